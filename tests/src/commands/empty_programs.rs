//! The subcommand `culvert-lab attach-empty`.
#![expect(clippy::print_stdout, reason = "the program prints reports")]

use anyhow::Result;
use aya::programs::{
    TcAttachType,
    tc::{self, NlOptions, TcAttachOptions},
};
use tunnel_tests::empty_program::EmptyProgram;

pub(crate) fn attach(links: &[String], as_filter: bool) -> Result<()> {
    let mut loaded = EmptyProgram::load()?;
    let program = loaded.program()?;
    for link in links {
        // Only a kernel without links at tc needs the qdisc. An error means that it exists.
        drop(tc::qdisc_add_clsact(link));
        for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
            if as_filter {
                let options = TcAttachOptions::Netlink(NlOptions::default());
                program.attach_with_options(link, direction, options)?;
            } else {
                program.attach(link, direction)?;
            }
        }
    }
    println!("attached");
    super::load::park()
}
