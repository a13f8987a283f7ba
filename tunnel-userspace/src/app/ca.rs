//! `culvert ca`: creates a CA and certificates, and prints the next steps.

use std::path::Path;

use jiff::Timestamp;

use crate::identity::ca::{self, CaError, Issued};

/// The section that the holder of the certificate needs in its config.
const CONFIG: &str = "tunnel:
  identity:
    files:
      ca: identity/ca.pem
      cert: identity/cert.pem
      key: identity/key.pem";

/// Creates a CA in a folder. Returns a text with the files and the next steps.
///
/// # Errors
///
/// The folder has a CA already, or it can't be created.
pub fn ca_init(dir: &Path, days: u32) -> Result<String, CaError> {
    let made = ca::init(dir, days, Timestamp::now())?;
    let (dir, cert, key) = (dir.display(), made.cert.display(), made.key.display());
    Ok(format!(
        "made the CA {cert}, valid until {}\n\
         its private key is {key}: back it up, and give it to nobody\n\
         \n\
         next:\n  \
         culvert ca issue gateway --dir {dir}\n  \
         culvert ca issue agent --dir {dir} --node NODE",
        made.expires
    ))
}

/// Issues the certificate of gateways. Returns a text with the files and the next steps.
///
/// # Errors
///
/// The CA can't be used, or a file can't be written.
pub fn ca_issue_gateway(dir: &Path, out: Option<&Path>, days: u32) -> Result<String, CaError> {
    let issued = ca::issue_gateway(dir, out, days, Timestamp::now())?;
    Ok(told(&issued, "a gateway", "each gateway"))
}

/// Issues the certificate of a node's agent. Returns a text with the files and the next steps.
///
/// # Errors
///
/// The name is no valid Node name, the CA can't be used, or a file can't be written.
pub fn ca_issue_agent(
    dir: &Path,
    node: &str,
    out: Option<&Path>,
    days: u32,
) -> Result<String, CaError> {
    let issued = ca::issue_agent(dir, node, out, days, Timestamp::now())?;
    let whose = format!("the agent of node {node}");
    Ok(told(&issued, &whose, &format!("node {node}")))
}

fn told(issued: &Issued, whose: &str, place: &str) -> String {
    let until = issued.expires;
    let why = if issued.is_shortened {
        ", when the CA itself expires"
    } else {
        ""
    };
    let files = &issued.files;
    let [ca, cert, key] = [&files.ca, &files.cert, &files.key].map(|path| path.display());
    format!(
        "issued the certificate of {whose}, valid until {until}{why}:\n  \
         {ca}\n  \
         {cert}\n  \
         {key} (the private key)\n\
         \n\
         copy the three files to /etc/culvert/identity on {place}, the key with mode 600,\n\
         and put this into /etc/culvert/culvert.yaml there:\n\
         \n\
         {CONFIG}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn the_lines_to_put_into_the_config_are_lines_of_a_config() {
        let dir = tempfile::tempdir().expect("a folder");
        ca_init(dir.path(), 10).expect("made");

        let told = ca_issue_agent(dir.path(), "edge-1", None, 10).expect("issued");

        let start = told.find("\ntunnel:").expect("the section");
        let config = Config::parse(&told[start..]).expect("a config");
        let files = config.tunnel.identity.expect("an identity").files;
        for path in [files.ca, files.cert, files.key] {
            let name = path.file_name().expect("a name");
            let written = dir.path().join("agents/edge-1").join(name);
            assert!(written.is_file(), "{}", written.display());
            let line = format!("\n  {}", written.display());
            assert!(told.contains(&line), "{line}: {told}");
        }
    }
}
