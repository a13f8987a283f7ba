//! `culvert ca`: makes a CA and certificates, and says what to do with them.

use std::path::Path;

use jiff::Timestamp;

use crate::identity::ca::{self, CaError, Issued};

/// Makes a CA in a folder. Gives a line for each thing that was done or is to be done.
///
/// # Errors
///
/// There is one already, or it can't be made.
pub fn ca_init(dir: &Path, days: u32) -> Result<Vec<String>, CaError> {
    let made = ca::init(dir, days, Timestamp::now())?;
    let dir = dir.display();
    Ok(vec![
        format!(
            "made the CA {}, valid until {}",
            made.cert.display(),
            made.expires
        ),
        format!(
            "its private key is {}: back it up, and give it to nobody",
            made.key.display()
        ),
        String::new(),
        "next:".to_owned(),
        format!("  culvert ca issue gateway --dir {dir}"),
        format!("  culvert ca issue agent --dir {dir} --node NODE"),
    ])
}

/// Issues the certificate of gateways. Gives a line for each thing that was done or is to be done.
///
/// # Errors
///
/// The CA can't be used, or a file can't be written.
pub fn ca_issue_gateway(dir: &Path, out: Option<&Path>, days: u32) -> Result<Vec<String>, CaError> {
    let issued = ca::issue_gateway(dir, out, days, Timestamp::now())?;
    Ok(told(&issued, "a gateway", "each gateway"))
}

/// Issues the certificate of a node's agent. Gives a line for each thing that was done or is to be
/// done.
///
/// # Errors
///
/// No node can have that name, the CA can't be used, or a file can't be written.
pub fn ca_issue_agent(
    dir: &Path,
    node: &str,
    out: Option<&Path>,
    days: u32,
) -> Result<Vec<String>, CaError> {
    let issued = ca::issue_agent(dir, node, out, days, Timestamp::now())?;
    let whose = format!("the agent of node {node}");
    Ok(told(&issued, &whose, &format!("node {node}")))
}

fn told(issued: &Issued, whose: &str, place: &str) -> Vec<String> {
    let until = issued.expires;
    let why = if issued.is_shortened {
        ", when the CA itself expires"
    } else {
        ""
    };
    let files = &issued.files;
    vec![
        format!("issued the certificate of {whose}, valid until {until}{why}:"),
        format!("  {}", files.ca.display()),
        format!("  {}", files.cert.display()),
        format!("  {} (the private key)", files.key.display()),
        String::new(),
        format!("copy the three files to /etc/culvert/identity on {place}, the key with mode 600,"),
        "and put this into /etc/culvert/culvert.yaml there:".to_owned(),
        String::new(),
        "tunnel:".to_owned(),
        "  identity:".to_owned(),
        "    files:".to_owned(),
        "      ca: identity/ca.pem".to_owned(),
        "      cert: identity/cert.pem".to_owned(),
        "      key: identity/key.pem".to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn the_lines_to_put_into_the_config_are_lines_of_a_config() {
        let dir = tempfile::tempdir().expect("a folder");
        ca_init(dir.path(), 10).expect("made");

        let lines = ca_issue_agent(dir.path(), "edge-1", None, 10).expect("issued");

        let start = lines.iter().position(|line| line == "tunnel:");
        let yaml = lines[start.expect("the section")..].join("\n");
        let config = Config::parse(&yaml).expect("a config");
        let files = config.tunnel.identity.expect("an identity").files;
        let names = [files.ca, files.cert, files.key];
        let written: Vec<_> = names
            .iter()
            .map(|path| {
                dir.path()
                    .join("agents/edge-1")
                    .join(path.file_name().expect("a name"))
            })
            .filter(|path| path.is_file())
            .collect();
        assert_eq!(written.len(), 3);
        for path in written {
            let path = path.display().to_string();
            assert!(
                lines.iter().any(|line| line.contains(&path)),
                "{path}: {lines:?}"
            );
        }
    }
}
