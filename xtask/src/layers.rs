//! The permitted dependencies between modules. Rust checks none inside a crate, so this reads the paths
//! in each file and compares them with [`table`].

mod paths;
mod table;
mod tokens;

use std::{fs, path::Path};

use anyhow::{Context as _, Result};

use self::{
    paths::{Named, named},
    table::{CLOSED, Closed, Rule, USERSPACE},
};
use crate::length;

/// Prints each path that the table refuses; returns false if there is one.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut complaints = Vec::new();
    let userspace = root.join("tunnel-userspace/src");
    for (file, source) in files(&userspace)? {
        let module = module_of(&file);
        for complaint in judge(&module, &source) {
            complaints.push(format!(
                "tunnel-userspace/src/{}:{complaint}",
                file.display()
            ));
        }
    }
    for closed in CLOSED {
        let folder = Path::new(closed.folder).join("src");
        for (file, source) in files(&root.join(&folder))? {
            for complaint in judge_closed(closed, &source) {
                complaints.push(format!("{}:{complaint}", folder.join(&file).display()));
            }
        }
    }
    for complaint in &complaints {
        println!("{complaint}");
    }
    Ok(complaints.is_empty())
}

/// Returns the source files of a crate with their text, without test files.
fn files(folder: &Path) -> Result<Vec<(std::path::PathBuf, String)>> {
    let mut found = Vec::new();
    for path in length::files(folder, "rs")? {
        let file = path.strip_prefix(folder)?.to_owned();
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

/// Returns the module of a file: `reconcile/diff.rs` is `reconcile::diff`; `lib.rs` is the root.
fn module_of(file: &Path) -> Vec<String> {
    let without_extension = file.with_extension("");
    let parts = without_extension
        .iter()
        .map(|part| part.to_string_lossy().into_owned());
    parts.filter(|part| part != "lib").collect()
}

/// Returns the violations in a file of `tunnel-userspace`, each beginning with its line.
fn judge(module: &[String], source: &str) -> Vec<String> {
    let Some(top) = module.first() else {
        // The root has only the list of modules.
        return Vec::new();
    };
    let name = module.join("::");
    let Some(rule) = rule_of(&name) else {
        return vec![format!(
            "1: module `{top}` has no row in the table of xtask/src/layers/table.rs"
        )];
    };
    let own = format!("crate::{top}");
    named(source, module)
        .into_iter()
        .filter(|named| !covers(&own, &named.path) && !is_allowed(rule, &named.path))
        .map(|Named { path, line, .. }| format!("{line}: `{}` may not use `{path}`", rule.module))
        .collect()
}

/// Returns the violations in a file of a crate with a short list of permitted dependencies.
fn judge_closed(closed: &Closed, source: &str) -> Vec<String> {
    let is_allowed =
        |path: &str| covers("crate", path) || closed.may.iter().any(|prefix| covers(prefix, path));
    named(source, &[])
        .into_iter()
        .filter(|named| named.is_use && !is_allowed(&named.path))
        .map(|Named { path, line, .. }| format!("{line}: `{}` may not use `{path}`", closed.folder))
        .collect()
}

/// Returns the row of the innermost module that has one.
fn rule_of(module: &str) -> Option<&'static Rule> {
    USERSPACE
        .iter()
        .filter(|rule| covers(rule.module, module))
        .max_by_key(|rule| rule.module.len())
}

/// Returns true if a rule permits a path. The longest matching entry decides; without one, other crates
/// are permitted and modules of this crate are not.
fn is_allowed(rule: &Rule, path: &str) -> bool {
    let longest = |prefixes: &[&str]| {
        prefixes
            .iter()
            .filter(|prefix| covers(prefix, path))
            .map(|prefix| prefix.len())
            .max()
    };
    match (longest(rule.may), longest(rule.never)) {
        (Some(may), Some(never)) => may > never,
        (may, None) => may.is_some() || !covers("crate", path),
        (None, Some(_)) => false,
    }
}

/// Returns true if a path equals the prefix, or is below it.
fn covers(prefix: &str, path: &str) -> bool {
    path.strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(file: &str, source: &str) -> Vec<String> {
        judge(&module_of(Path::new(file)), source)
    }

    #[test]
    fn what_the_table_allows_passes() {
        let rows = "
            app/node.rs: use crate::{bpf, plan, source}; use aya::Ebpf; use kube::Client;
            bpf/maps.rs: use aya::maps::HashMap; use crate::reconcile::MapWriter;
            k8s/service.rs: use k8s_openapi::api; use crate::model::Service;
            lib.rs: pub mod plan; pub use crate::plan::Desired;
            model/node.rs: use tunnel_common::addr::Protocol; use super::ObjectName;
            plan/front.rs: use std::{net::IpAddr, time::Duration}; use super::id::Ids;
            reconcile.rs: use crate::plan::Desired; use tokio::sync::watch;
            source/kube.rs: use kube::Client; use super::store::Store;";
        for row in rows.trim().lines() {
            let (file, source) = row.trim().split_once(": ").expect("a row");
            assert_eq!(complaints(file, source), Vec::<String>::new(), "{row}");
        }
    }

    #[test]
    fn what_the_table_refuses_is_named_with_its_module() {
        let rows = "
            admin.rs: use crate::bpf::Maps; => crate::bpf::Maps
            admin.rs: use crate::reconcile::{MapWriter, Stats}; => crate::reconcile::MapWriter
            admin.rs: use aya::Ebpf; => aya::Ebpf
            bpf.rs: use crate::plan::Desired; => crate::plan::Desired
            cli.rs: fn f() { crate::app::run() } => crate::app::run
            k8s/node.rs: use kube::Api; => kube::Api
            model/service.rs: use tunnel_common::service::Front; => tunnel_common::service::Front
            plan.rs: fn f() { std::time::SystemTime::now(); } => std::time::SystemTime::now
            plan/front.rs: use super::super::reconcile::Actual; => crate::reconcile::Actual
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

        let wanted = "1: module `helper` has no row in the table of xtask/src/layers/table.rs";
        assert_eq!(found, [wanted]);
    }

    #[test]
    fn the_kernel_side_uses_nothing_of_user_space() {
        let common = CLOSED.first().expect("tunnel-common comes first");

        let good = judge_closed(common, "use core::mem; use crate::addr::Port;");
        assert_eq!(good, Vec::<String>::new());
        let wanted = "1: `tunnel-common` may not use `tunnel_userspace_like::X`";
        let bad = judge_closed(common, "use tunnel_userspace_like::X;");
        assert_eq!(bad, [wanted]);
    }

    #[test]
    fn a_name_that_only_begins_alike_is_another() {
        assert!(covers("aya", "aya::maps"));
        assert!(!covers("aya", "aya_obj::maps"));
    }
}
