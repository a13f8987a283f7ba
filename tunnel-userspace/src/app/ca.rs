//! `culvert ca`: creates a CA and issues certificates. The returned messages include the next steps.

use std::path::Path;

use jiff::Timestamp;

use crate::identity::ca::{self, CaError, IssuedCertificate};

/// The config section that a gateway or agent needs to use its certificate.
const CONFIG: &str = "tunnel:
  identity:
    files:
      ca: identity/ca.pem
      cert: identity/cert.pem
      key: identity/key.pem";

/// Creates a CA in a directory. Returns a message that lists the files and the next steps.
///
/// # Errors
///
/// Returns an error if the directory already has a CA, or if a file can't be written.
pub fn ca_init(dir: &Path, days: u32) -> Result<String, CaError> {
    let created = ca::init(dir, days, Timestamp::now())?;
    let (dir, cert, key) = (dir.display(), created.cert.display(), created.key.display());
    Ok(format!(
        "created the CA {cert}, valid until {}\n\
         its private key is {key}: back it up and keep it secret\n\
         \n\
         next:\n  \
         culvert ca issue gateway --dir {dir}\n  \
         culvert ca issue agent --dir {dir} --node NODE",
        created.expires
    ))
}

/// Issues a certificate for gateways. Returns a message that lists the files and the next steps.
///
/// # Errors
///
/// Returns an error if the CA can't be read, or if a file can't be written.
pub fn ca_issue_gateway(dir: &Path, out: Option<&Path>, days: u32) -> Result<String, CaError> {
    let issued = ca::issue_gateway(dir, out, days, Timestamp::now())?;
    Ok(describe(&issued, "gateways", "each gateway"))
}

/// Issues a certificate for a node's agent. Returns a message that lists the files and the next steps.
///
/// # Errors
///
/// Returns an error if the name is not a valid Node name, the CA can't be read, or a file can't be written.
pub fn ca_issue_agent(
    dir: &Path,
    node: &str,
    out: Option<&Path>,
    days: u32,
) -> Result<String, CaError> {
    let issued = ca::issue_agent(dir, node, out, days, Timestamp::now())?;
    let holder = format!("the agent of node {node}");
    Ok(describe(&issued, &holder, &format!("node {node}")))
}

/// Describes an issued certificate, its files and the next steps.
fn describe(issued: &IssuedCertificate, holder: &str, hosts: &str) -> String {
    let until = issued.expires;
    let note = if issued.is_shortened {
        ", when the CA expires"
    } else {
        ""
    };
    let files = &issued.files;
    let [ca, cert, key] = [&files.ca, &files.cert, &files.key].map(|path| path.display());
    format!(
        "issued a certificate for {holder}, valid until {until}{note}:\n  \
         {ca}\n  \
         {cert}\n  \
         {key} (the private key)\n\
         \n\
         copy the three files to /etc/culvert/identity on {hosts}, the key with mode 0600,\n\
         and add this section to /etc/culvert/culvert.yaml there:\n\
         \n\
         {CONFIG}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn the_printed_config_section_is_valid_and_names_the_written_files() {
        let dir = tempfile::tempdir().expect("a directory");
        ca_init(dir.path(), 10).expect("created");

        let text = ca_issue_agent(dir.path(), "edge-1", None, 10).expect("issued");

        let start = text.find("\ntunnel:").expect("the section");
        let config = Config::parse(&text[start..]).expect("a config");
        let files = config
            .tunnel
            .identity
            .expect("an identity")
            .files
            .expect("files");
        for path in [files.ca, files.cert, files.key] {
            let name = path.file_name().expect("a name");
            let written = dir.path().join("agents/edge-1").join(name);
            assert!(written.is_file(), "{}", written.display());
            let line = format!("\n  {}", written.display());
            assert!(text.contains(&line), "{line}: {text}");
        }
    }
}
