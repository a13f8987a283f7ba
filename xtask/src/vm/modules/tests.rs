use super::*;

fn needing(hard: &[&str], soft: &[&str]) -> Known {
    let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    Known::Module(Needs {
        hard: owned(hard),
        soft: owned(soft),
    })
}

/// Returns the modules of a small kernel.
fn kernel(name: &str) -> Result<Known> {
    Ok(match name {
        "veth" | "nf_defrag_ipv4" | "crc32c_generic" => needing(&[], &[]),
        "libcrc32c" => needing(&[], &["crc32c"]),
        "nf_conntrack" => needing(&["nf_defrag_ipv4", "libcrc32c", "ipv6"], &[]),
        "ip_vs" => needing(&["nf_conntrack", "libcrc32c"], &[]),
        "ip_vs_rr" => needing(&["ip_vs"], &["no_such"]),
        "broken" => needing(&["no_such"], &[]),
        "ipv6" => Known::Builtin,
        _ => Known::Nothing,
    })
}

#[test]
fn each_module_comes_once_and_after_what_it_needs() {
    let order = order(&["ip-vs-rr", "veth", "ip_vs"], kernel).expect("an order");

    let wanted = "nf_defrag_ipv4 crc32c_generic libcrc32c nf_conntrack ip_vs ip_vs_rr veth";
    assert_eq!(order.join(" "), wanted);
}

#[test]
fn an_unknown_name_is_left_out_but_not_what_a_module_needs() {
    let found = order(&["tls", "ipv6", "veth"], kernel).expect("an order");
    assert_eq!(found, ["veth"]);

    let error = order(&["broken"], kernel).expect_err("not whole");
    let error = error.to_string();
    assert!(error.contains("broken needs no_such"), "{error}");
}

#[test]
fn only_what_is_neither_a_module_nor_built_in_is_absent() {
    let modules = Modules {
        files: BTreeMap::from([("ip_vs".to_owned(), PathBuf::new())]),
        builtin: BTreeSet::from(["tun".to_owned()]),
    };

    assert_eq!(modules.absent(&["tun", "ip-vs", "tls"]), ["tls"]);
}

#[test]
fn needs_stand_between_zero_bytes() {
    let modinfo = b"license=GPL\0depends=udp_tunnel,ip6-udp-tunnel\0\
                    softdep=pre: crc32c libcrc-x post: later\0alias=rtnl-link-vxlan\0depends=\0";

    let needs = needs_in(modinfo);

    assert_eq!(needs.hard, ["udp_tunnel", "ip6_udp_tunnel"]);
    assert_eq!(needs.soft, ["crc32c", "libcrc_x"]);
}

#[test]
fn a_signature_is_cut_off_and_must_be_in_its_module() {
    let signed = |module: &[u8], length: u8| {
        let end = [0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, length];
        without_signature([module, &end, SIGNED].concat())
    };
    assert_eq!(signed(b"codesignature", 9).expect("cut"), b"code");
    let unsigned = without_signature(b"code".to_vec());
    assert_eq!(unsigned.expect("as it is"), b"code");
    signed(b"code", 5).expect_err("longer than its module");
    without_signature(SIGNED.to_vec()).expect_err("cut off");
}

#[test]
fn the_name_of_a_module_is_that_of_its_file_with_underscores() {
    for (path, name) in [
        ("kernel/drivers/net/veth.ko", "veth"),
        ("/a/net/802/8021q.ko.xz", "8021q"),
        ("kernel/crypto/crc32c-generic.ko.zst", "crc32c_generic"),
        ("modules.builtin", ""),
        ("kernel/veth.ko.bak", ""),
    ] {
        assert_eq!(name_of(path).unwrap_or_default(), name, "{path}");
    }
}
