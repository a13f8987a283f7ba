use super::*;

fn refusal(text: &str) -> (String, String) {
    Config::parse(text).expect_err("refused")
}

#[test]
fn an_empty_file_gives_the_defaults_and_so_does_the_documented_one() {
    let empty = Config::parse("").expect("good");
    let documented = Config::parse(Config::default_file()).expect("good");

    assert_eq!(empty, documented);
}

#[test]
fn the_documented_file_names_every_field() {
    let documented: serde_json::Value =
        serde_saphyr::from_str(Config::default_file()).expect("YAML");
    let defaults = serde_json::to_value(Config::parse("").expect("good")).expect("JSON");

    assert_eq!(fields(&documented, ""), fields(&defaults, ""));
}

fn fields(value: &serde_json::Value, path: &str) -> Vec<String> {
    let Some(map) = value.as_object() else {
        return vec![path.to_owned()];
    };
    let mut names: Vec<_> = map
        .iter()
        .flat_map(|(name, value)| fields(value, &format!("{path}.{name}")))
        .collect();
    names.sort();
    names
}

#[test]
fn an_unknown_field_is_refused_by_name() {
    let (field, reason) = refusal("bpf: { bpfs: /x }");

    assert_eq!(field, "bpf.bpfs");
    assert!(reason.contains("unknown field `bpfs`"), "{reason}");
}

#[test]
fn a_value_that_cannot_be_is_refused_with_its_field() {
    assert_eq!(refusal("bpf: { maps: { fronts: 0 } }").0, "bpf.maps.fronts");
    assert_eq!(
        refusal("bpf: { maps: { fronts: many } }").0,
        "bpf.maps.fronts"
    );
    assert_eq!(refusal("admin: { address: localhost }").0, "admin.address");
    assert_eq!(refusal("mode: userspace").0, "mode");
    assert_eq!(refusal("mode: iptables").0, "mode");
    assert_eq!(refusal("service: { fullSync: 0s }").0, "service.fullSync");
    assert_eq!(
        refusal("service: { clusterCIDRs: [10.0.0.0/33] }").0,
        "service.clusterCIDRs[0]"
    );
    assert_eq!(
        refusal("service: { nodePortAddresses: [eth0] }").0,
        "service.nodePortAddresses[0]"
    );
}

#[test]
fn absent_and_empty_node_port_addresses_are_two_things() {
    let addresses = |text: &str| {
        Config::parse(text)
            .expect("good")
            .service
            .node_port_addresses
    };

    assert_eq!(addresses(""), None);
    assert_eq!(
        addresses("service: { nodePortAddresses: [] }"),
        Some(Vec::new())
    );
}

#[test]
fn relative_paths_are_relative_to_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("culvert.yaml");
    let text = "source: { file: { path: ./manifests } }\n\
                stateDir: state\n\
                bpf: { cgroup: /sys/fs/cgroup/x, bpffs: ../pins }\n";
    fs::write(&file, text).expect("written");

    let config = Config::read(&file).expect("good");

    assert_eq!(config.source.file.path, folder.path().join("./manifests"));
    assert_eq!(
        config.admin_socket(),
        folder.path().join("state/admin.sock")
    );
    assert_eq!(config.bpf.bpffs, folder.path().join("../pins"));
    assert_eq!(config.bpf.cgroup.0, Some("/sys/fs/cgroup/x".into()));
}

#[test]
fn the_page_on_configuration_shows_the_file_of_defaults() {
    let page = include_str!("../../../docs/configuration.md");

    assert!(
        page.contains(Config::default_file()),
        "docs/configuration.md is out of date"
    );
}
