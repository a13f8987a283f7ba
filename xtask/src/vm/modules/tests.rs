use super::*;

fn module(required: &[&str], soft: &[&str]) -> Lookup {
    let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    Lookup::Module(Dependencies {
        required: owned(required),
        soft: owned(soft),
    })
}

/// Looks up a module in a small, fictitious kernel.
fn look_up(name: &str) -> Result<Lookup> {
    Ok(match name {
        "veth" | "nf_defrag_ipv4" | "crc32c_generic" => module(&[], &[]),
        "libcrc32c" => module(&[], &["crc32c"]),
        "nf_conntrack" => module(&["nf_defrag_ipv4", "libcrc32c", "ipv6"], &[]),
        "ip_vs" => module(&["nf_conntrack", "libcrc32c"], &[]),
        "ip_vs_rr" => module(&["ip_vs"], &["no_such"]),
        "broken" => module(&["no_such"], &[]),
        "ipv6" => Lookup::Builtin,
        _ => Lookup::NotFound,
    })
}

#[test]
fn each_module_is_loaded_once_and_after_its_dependencies() {
    let order = order(&["ip-vs-rr", "veth", "ip_vs"], look_up).expect("an order");

    let wanted = "nf_defrag_ipv4 crc32c_generic libcrc32c nf_conntrack ip_vs ip_vs_rr veth";
    assert_eq!(order.join(" "), wanted);
}

#[test]
fn a_missing_module_is_skipped_unless_another_requires_it() {
    let found = order(&["tls", "ipv6", "veth"], look_up).expect("an order");
    assert_eq!(found, ["veth"]);

    let error = order(&["broken"], look_up).expect_err("a missing dependency");
    let error = error.to_string();
    assert!(error.contains("broken requires no_such"), "{error}");
}

#[test]
fn a_module_is_absent_if_it_has_no_file_and_is_not_built_in() {
    let modules = Modules {
        files: BTreeMap::from([("ip_vs".to_owned(), PathBuf::new())]),
        builtin: BTreeSet::from(["tun".to_owned()]),
    };

    assert_eq!(modules.absent(&["tun", "ip-vs", "tls"]), ["tls"]);
}

#[test]
fn dependencies_are_read_from_modinfo() {
    let modinfo = b"license=GPL\0depends=udp_tunnel,ip6-udp-tunnel\0\
                    softdep=pre: crc32c libcrc-x post: later\0alias=rtnl-link-vxlan\0depends=\0";

    let dependencies = parse_modinfo(modinfo);

    assert_eq!(dependencies.required, ["udp_tunnel", "ip6_udp_tunnel"]);
    assert_eq!(dependencies.soft, ["crc32c", "libcrc_x"]);
}

#[test]
fn a_signature_is_removed_and_must_not_be_longer_than_its_module() {
    let signed = |module: &[u8], length: u8| {
        let end = [0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, length];
        strip_signature([module, &end, SIGNATURE_MARK].concat())
    };
    assert_eq!(signed(b"codesignature", 9).expect("removed"), b"code");
    let unsigned = strip_signature(b"code".to_vec());
    assert_eq!(unsigned.expect("unchanged"), b"code");
    signed(b"code", 5).expect_err("longer than its module");
    strip_signature(SIGNATURE_MARK.to_vec()).expect_err("incomplete");
}

#[test]
fn a_module_is_named_as_its_file_with_underscores() {
    for (path, name) in [
        ("kernel/drivers/net/veth.ko", "veth"),
        ("/a/net/802/8021q.ko.xz", "8021q"),
        ("kernel/crypto/crc32c-generic.ko.zst", "crc32c_generic"),
        ("modules.builtin", ""),
        ("kernel/veth.ko.bak", ""),
    ] {
        assert_eq!(module_name(path).unwrap_or_default(), name, "{path}");
    }
}
