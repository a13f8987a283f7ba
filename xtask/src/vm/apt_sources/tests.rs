use super::*;

const DEB822: &str = "\
# The system's own.
Types: deb
# http://other.example/debian
URIs: http://mirror.example/debian/
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /keys/debian.gpg

Types: deb deb-src
URIs: http://mirror.example/debian-security
Suites:
 bookworm-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEY865UxYJKwYB
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://disabled.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb-src
URIs: http://sources.example/debian
Suites: bookworm
Components: main
";

fn mirror(uri: &str, keyrings: &[&str]) -> Mirror {
    Mirror {
        uri: uri.to_owned(),
        keyrings: keyrings.iter().map(|&path| path.to_owned()).collect(),
    }
}

#[test]
fn disabled_and_source_only_stanzas_are_skipped() {
    let entries = parse_deb822(DEB822);

    assert_eq!(entries.len(), 2);
    assert_eq!(entries[0].uri, "http://mirror.example/debian");
    assert_eq!(entries[0].suites, ["bookworm", "bookworm-updates"]);
    assert_eq!(entries[0].components, ["main", "contrib"]);
    assert_eq!(entries[0].keyrings, ["/keys/debian.gpg"]);
    assert_eq!(entries[1].suites, ["bookworm-security"]);
    // The stanza contains an inline key instead of a path.
    assert!(entries[1].keyrings.is_empty());
}

#[test]
fn a_line_is_read_with_and_without_options_unless_it_is_source_only_or_a_comment() {
    let plain = parse_line("deb http://mirror.example/debian bookworm main non-free # ours");
    let plain = plain.expect("an entry");
    assert_eq!(plain.uri, "http://mirror.example/debian");
    assert_eq!(plain.suites, ["bookworm"]);
    assert_eq!(plain.components, ["main", "non-free"]);

    let signed = parse_line("deb [ arch=amd64 signed-by=/a.gpg,/b.gpg ] http://x.example sid main");
    assert_eq!(signed.expect("an entry").keyrings, ["/a.gpg", "/b.gpg"]);

    for line in [
        "deb-src http://mirror.example/debian sid main",
        "# deb http://mirror.example/debian sid main",
        "",
    ] {
        assert_eq!(parse_line(line), None, "{line}");
    }
}

#[test]
fn entries_of_other_vendors_with_the_same_suite_are_not_chosen() {
    let other = |line| parse_line(line).expect("an entry");
    let mut entries = vec![
        other("deb http://containers.example/linux/debian bookworm stable"),
        other("deb http://tools.example/debian/12/prod bookworm main"),
    ];
    entries.extend(parse_deb822(DEB822));

    let mirrors = Mirrors::choose(&entries, "bookworm").expect("mirrors");

    let main = mirror("http://mirror.example/debian", &["/keys/debian.gpg"]);
    assert_eq!(mirrors.of("trixie-backports"), &main);
    let security = mirror("http://mirror.example/debian-security", &[]);
    assert_eq!(mirrors.of("bullseye-security"), &security);
}

#[test]
fn a_mirror_list_in_a_file_is_chosen_by_its_suite() {
    let entries = parse_deb822(
        "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\nSuites: bookworm\n\
         Components: main\n\n\
         Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian-security.list\n\
         Suites: bookworm-security\nComponents: main\n",
    );

    let mirrors = Mirrors::choose(&entries, "bookworm").expect("mirrors");

    assert!(mirrors.main.uri.ends_with("/debian.list"));
    assert!(mirrors.security.uri.ends_with("/debian-security.list"));
}

#[test]
fn without_an_entry_the_security_archive_is_next_to_the_main_one() {
    let chosen = |line| Mirrors::choose(&[parse_line(line).expect("an entry")], "bookworm");

    let mirrors = chosen("deb http://mirror.example/debian bookworm main").expect("mirrors");
    let security = "http://mirror.example/debian-security";
    assert_eq!(mirrors.security.uri, security);
    chosen("deb http://other.example/apt nodistro main").expect_err("no mirror");
}

#[test]
fn a_generated_line_names_the_keyrings() {
    let keyrings = ["/keys/one.gpg", "/keys/two.gpg"];
    let line = mirror("http://mirror.example/debian", &keyrings).line("sid");
    let (head, tail) = line.split_once("] ").expect("options");
    let keys = "deb [arch=amd64 signed-by=/keys/one.gpg,/keys/two.gpg";
    assert!(head.starts_with(keys), "{line}");
    assert_eq!(tail, "http://mirror.example/debian sid main\n");

    let line = mirror("http://mirror.example/debian", &[]).line("sid");
    assert!(line.contains(&format!("signed-by={KEYRING}]")), "{line}");
}

#[test]
fn the_codename_is_read_with_and_without_quotes() {
    let named = "ID=debian\nVERSION_CODENAME=bookworm\n";
    assert_eq!(codename(named), Some("bookworm"));
    assert_eq!(codename("VERSION_CODENAME=\"trixie\"\n"), Some("trixie"));
    assert_eq!(codename("ID=debian\n"), None);
}
