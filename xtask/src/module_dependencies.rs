//! Checks the dependencies between modules. Rust has no such check for the modules of one crate, so this
//! reads the paths in each file and compares them with the table in [`allowed_dependencies`].

mod allowed_dependencies;
mod paths;
mod tokens;

use std::{fs, path::Path};

use anyhow::{Context as _, Result};

use self::{
    allowed_dependencies::{CrateRule, KERNEL_CRATES, Rule, USERSPACE},
    paths::{FoundPath, find_paths},
};
use crate::workspace;

/// Prints each path that the table does not permit; returns false if there are any.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut complaints = Vec::new();
    let userspace = root.join("tunnel-userspace/src");
    for (file, source) in read_sources(&userspace)? {
        let module = module_of(&file);
        for complaint in check_module(&module, &source) {
            complaints.push(format!(
                "tunnel-userspace/src/{}:{complaint}",
                file.display()
            ));
        }
    }
    for rule in KERNEL_CRATES {
        let directory = Path::new(rule.directory).join("src");
        for (file, source) in read_sources(&root.join(&directory))? {
            for complaint in check_kernel_crate(rule, &source) {
                complaints.push(format!("{}:{complaint}", directory.join(&file).display()));
            }
        }
    }
    for complaint in &complaints {
        println!("{complaint}");
    }
    Ok(complaints.is_empty())
}

/// Returns the path and the text of each source file in a directory, except for test files.
fn read_sources(directory: &Path) -> Result<Vec<(std::path::PathBuf, String)>> {
    let mut found = Vec::new();
    for path in workspace::list_files(directory, "rs")? {
        let file = path.strip_prefix(directory)?.to_owned();
        if file.components().any(|part| part.as_os_str() == "tests")
            || file.file_stem().is_some_and(|stem| stem == "tests")
        {
            continue;
        }
        let source =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        found.push((file, source));
    }
    Ok(found)
}

/// Returns the path of a file's module: `reconcile/diff.rs` is `reconcile::diff`; `lib.rs` is the root.
fn module_of(file: &Path) -> Vec<String> {
    let without_extension = file.with_extension("");
    let parts = without_extension
        .iter()
        .map(|part| part.to_string_lossy().into_owned());
    parts.filter(|part| part != "lib").collect()
}

/// Returns the violations in a file of `tunnel-userspace`, each preceded by its line number.
fn check_module(module: &[String], source: &str) -> Vec<String> {
    let Some(top) = module.first() else {
        // The crate root only declares modules.
        return Vec::new();
    };
    let name = module.join("::");
    let Some(rule) = rule_of(&name) else {
        return vec![format!(
            "1: module `{top}` has no row in xtask/src/module_dependencies/allowed_dependencies.rs"
        )];
    };
    let own = format!("crate::{top}");
    find_paths(source, module)
        .into_iter()
        .filter(|found| !covers(&own, &found.path) && !is_allowed(rule, &found.path))
        .map(|FoundPath { path, line, .. }| {
            format!("{line}: `{}` may not use `{path}`", rule.module)
        })
        .collect()
}

/// Returns the violations in a source file of a crate that is compiled for the kernel.
fn check_kernel_crate(rule: &CrateRule, source: &str) -> Vec<String> {
    let is_allowed =
        |path: &str| covers("crate", path) || rule.may.iter().any(|prefix| covers(prefix, path));
    find_paths(source, &[])
        .into_iter()
        .filter(|found| found.is_use && !is_allowed(&found.path))
        .map(|FoundPath { path, line, .. }| {
            format!("{line}: `{}` may not use `{path}`", rule.directory)
        })
        .collect()
}

/// Returns the rule for a module, or for the nearest parent that has one.
fn rule_of(module: &str) -> Option<&'static Rule> {
    USERSPACE
        .iter()
        .filter(|rule| covers(rule.module, module))
        .max_by_key(|rule| rule.module.len())
}

/// Returns true if a rule permits a path. The longest matching prefix decides. If none matches, other crates
/// are permitted, but not other modules of this crate.
fn is_allowed(rule: &Rule, path: &str) -> bool {
    let longest_match = |prefixes: &[&str]| {
        prefixes
            .iter()
            .filter(|prefix| covers(prefix, path))
            .map(|prefix| prefix.len())
            .max()
    };
    match (longest_match(rule.may), longest_match(rule.never)) {
        (Some(may), Some(never)) => may > never,
        (may, None) => may.is_some() || !covers("crate", path),
        (None, Some(_)) => false,
    }
}

/// Returns true if a path equals the prefix or lies below it.
fn covers(prefix: &str, path: &str) -> bool {
    path.strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(file: &str, source: &str) -> Vec<String> {
        check_module(&module_of(Path::new(file)), source)
    }

    #[test]
    fn paths_that_the_table_permits_pass() {
        let rows = "
            app/node.rs: use crate::{bpf, plan, source}; use aya::Ebpf; use kube::Client;
            bpf/maps.rs: use aya::maps::HashMap; use crate::reconcile::MapWriter;
            k8s/service.rs: use k8s_openapi::api; use crate::model::Service;
            lib.rs: pub mod plan; pub use crate::plan::Desired;
            model/node.rs: use tunnel_common::addr::Protocol; use super::ObjectName;
            plan/frontend.rs: use std::{net::IpAddr, time::Duration}; use super::id::Ids;
            reconcile.rs: use crate::plan::Desired; use tokio::sync::watch;
            source/kube.rs: use kube::Client; use super::store::Store;";
        for row in rows.trim().lines() {
            let (file, source) = row.trim().split_once(": ").expect("a row");
            assert_eq!(complaints(file, source), Vec::<String>::new(), "{row}");
        }
    }

    #[test]
    fn each_path_that_the_table_refuses_is_named_with_its_module() {
        let rows = "
            admin.rs: use crate::bpf::Maps; => crate::bpf::Maps
            admin.rs: use crate::reconcile::{MapWriter, ReconcileStats}; => crate::reconcile::MapWriter
            admin.rs: use aya::Ebpf; => aya::Ebpf
            bpf.rs: use crate::plan::Desired; => crate::plan::Desired
            cli.rs: fn f() { crate::app::run() } => crate::app::run
            k8s/node.rs: use kube::Api; => kube::Api
            model/service.rs: use tunnel_common::service::Frontend; => tunnel_common::service::Frontend
            plan.rs: fn f() { std::time::SystemTime::now(); } => std::time::SystemTime::now
            plan/frontend.rs: use super::super::reconcile::Actual; => crate::reconcile::Actual
            source/file.rs: use kube::Client; => kube::Client";
        for row in rows.trim().lines() {
            let (file, rest) = row.trim().split_once(": ").expect("a row");
            let (source, path) = rest.split_once(" => ").expect("a row");
            let module = file.split(['/', '.']).next().expect("a name");
            let complaint = format!("1: `{module}` may not use `{path}`");
            assert_eq!(complaints(file, source), [complaint], "{row}");
        }
    }

    #[test]
    fn a_module_without_a_row_is_named() {
        let found = complaints("helper.rs", "use std::fmt;");

        let wanted = "1: module `helper` has no row in xtask/src/module_dependencies/allowed_dependencies.rs";
        assert_eq!(found, [wanted]);
    }

    #[test]
    fn a_crate_of_the_kernel_programs_may_not_use_user_space() {
        let common = KERNEL_CRATES.first().expect("tunnel-common is first");

        let good = check_kernel_crate(common, "use core::mem; use crate::addr::Port;");
        assert_eq!(good, Vec::<String>::new());
        let wanted = "1: `tunnel-common` may not use `tunnel_userspace_like::X`";
        let bad = check_kernel_crate(common, "use tunnel_userspace_like::X;");
        assert_eq!(bad, [wanted]);
    }

    #[test]
    fn a_prefix_matches_complete_names_only() {
        assert!(covers("aya", "aya::maps"));
        assert!(!covers("aya", "aya_obj::maps"));
    }
}
