//! The arguments of `culvert ca`, and the implementation of `culvert ca show`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use jiff::Timestamp;

use super::{OutputFormat, QueryError, table};
use crate::identity::ca::{self, CertificateKind, CertificateView, DEFAULT_CA_DAYS, DEFAULT_DAYS};

/// The default path of the CA's directory.
const DEFAULT_DIR: &str = "/etc/culvert/ca";

/// The subcommands of `culvert ca`.
#[derive(Debug, Subcommand)]
pub enum CaCommand {
    /// Create a CA. An existing CA is never overwritten.
    Init(CaInit),
    /// Issue a certificate and a private key. Existing files are replaced.
    Issue {
        /// The holder of the certificate.
        #[command(subcommand)]
        whom: CaIssue,
    },
    /// Show the contents of certificates.
    Show(CaShow),
}

/// The arguments of `culvert ca init`.
#[derive(Debug, Args)]
pub struct CaInit {
    /// The CA's directory.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIR)]
    pub dir: PathBuf,
    /// The number of days for which the CA is valid.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CA_DAYS)]
    pub days: u32,
}

/// The subcommands of `culvert ca issue`.
#[derive(Debug, Subcommand)]
pub enum CaIssue {
    /// Issue a certificate for gateways, by default into the `gateway` subdirectory of the CA's directory.
    Gateway(IssueArgs),
    /// Issue a certificate for a node's agent, by default into the `agents/NODE` subdirectory of the CA's
    /// directory.
    Agent {
        /// The name of the agent's Node object.
        #[arg(long, value_name = "NODE")]
        node: String,
        /// The options for the certificate.
        #[command(flatten)]
        args: IssueArgs,
    },
}

/// The options of `culvert ca issue`.
#[derive(Debug, Args)]
pub struct IssueArgs {
    /// The CA's directory.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIR)]
    pub dir: PathBuf,
    /// The directory to write ca.pem, cert.pem and key.pem to.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// The number of days for which the certificate is valid. It never outlives the CA.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_DAYS)]
    pub days: u32,
}

/// The arguments of `culvert ca show`.
#[derive(Debug, Args)]
pub struct CaShow {
    /// The certificate files to show.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The CA's directory. If no FILE is given, the CA's certificate and those that it has issued into this
    /// directory are shown.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIR, conflicts_with = "files")]
    dir: PathBuf,
    /// The output format.
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "table")]
    output: OutputFormat,
}

impl CaShow {
    /// Prints the contents of the certificates.
    ///
    /// # Errors
    ///
    /// Returns an error if a certificate can't be read, or if the output can't be written.
    pub fn run(&self) -> Result<(), QueryError> {
        let files = if self.files.is_empty() {
            ca::certificate_files(&self.dir)?
        } else {
            self.files.clone()
        };
        let now = Timestamp::now();
        let mut views = Vec::new();
        for file in files {
            views.extend(ca::read_certificates(&file, now)?);
        }
        let json = serde_json::to_vec_pretty(&views).map_err(std::io::Error::from)?;
        super::print_response(self.output, &json, || Ok(render(&views, now)))
    }
}

fn render(views: &[CertificateView], now: Timestamp) -> String {
    let row = |view: &CertificateView| {
        vec![
            role(view.role).to_owned(),
            table::or_dash(view.node.as_ref()),
            view.serial.to_string(),
            residual_time(view, now),
            view.not_before.to_string(),
            view.not_after.to_string(),
            view.subject.clone(),
            view.issuer.clone(),
            view.file.display().to_string(),
            view.fingerprint.clone(),
        ]
    };
    let rows: Vec<_> = views.iter().map(row).collect();
    let head = [
        "ROLE",
        "NODE",
        "SERIAL",
        "RESIDUAL TIME",
        "NOT BEFORE",
        "NOT AFTER",
        "SUBJECT",
        "ISSUER",
        "FILE",
        "SHA-256",
    ];
    table::render(&head, &rows)
}

const fn role(kind: CertificateKind) -> &'static str {
    match kind {
        CertificateKind::Ca => "ca",
        CertificateKind::Gateway => "gateway",
        CertificateKind::Agent => "agent",
        CertificateKind::Other => "other",
    }
}

fn residual_time(view: &CertificateView, now: Timestamp) -> String {
    if now < view.not_before {
        return "not valid yet".to_owned();
    }
    match view.days_left {
        ..=-1 => "expired".to_owned(),
        1 => "1 day".to_owned(),
        days => format!("{days} days"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_certificate_has_a_row_with_its_residual_time() {
        let from: Timestamp = "2026-03-01T00:00:00Z".parse().expect("a time");
        let view = |role, node: Option<&str>, days_left| CertificateView {
            file: "a.pem".into(),
            role,
            node: node.map(str::to_owned),
            serial: serde_json::from_value("8a01f0".into()).expect("a serial number"),
            subject: "S".to_owned(),
            issuer: "I".to_owned(),
            not_before: from,
            not_after: from,
            days_left,
            fingerprint: "F".to_owned(),
        };
        let views = [
            view(CertificateKind::Ca, None, 3650),
            view(CertificateKind::Agent, Some("edge-1"), 1),
            view(CertificateKind::Gateway, None, -1),
        ];

        let shown = render(&views, from);

        let starts: Vec<_> = shown.lines().map(|line| &line[..46]).collect();
        assert_eq!(
            starts,
            [
                "ROLE      NODE     SERIAL   RESIDUAL TIME   NO",
                "ca        -        8a01f0   3650 days       20",
                "agent     edge-1   8a01f0   1 day           20",
                "gateway   -        8a01f0   expired         20",
            ]
        );
        let early = render(&views[..1], "2026-02-28T23:59:59Z".parse().expect("a time"));
        assert!(early.contains("not valid yet"), "{early}");
    }
}
