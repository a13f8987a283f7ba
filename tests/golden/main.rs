//! Kubernetes objects in, map entries out: one folder a case, no kernel.
//!
//! A case is read and programmed as a node does it, into maps in memory. What they hold, and what
//! was refused, is written one entry a line, sorted, with names in the place of indices.

use std::{collections::BTreeMap, fs, io, path::Path};

use anyhow::{Context as _, Result, ensure};
use tunnel_common::service::{Backend, Set};
use tunnel_userspace::{
    model::Algorithm,
    reconcile::{Grace, MapReader, MapWriter, ReadError, Reconciler, Settings, Sizes, WriteError},
    source::file,
};

#[cfg(test)]
mod deploy;
#[path = "../../tunnel-userspace/src/reconcile/tests/memory.rs"]
mod memory;

use memory::Memory;

const SIZES: Sizes = Sizes {
    fronts: 128,
    slots: 256,
    backends: 256,
    steering: 16,
};

struct NoGrace;

impl Grace for NoGrace {
    fn wait(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Programs the objects of a case and gives the lines of what came of it.
fn program(objects: &Path) -> Result<Vec<String>> {
    let (mut store, problems) = file::read(objects)?;
    let settings = Settings {
        node_name: "node-a".to_owned(),
        algorithm: Algorithm::Random,
    };
    let mut maps = Memory::new(SIZES);
    maps.grace();
    let mut reconciler = Reconciler::adopt(maps, SIZES, &mut NoGrace, settings)?;
    let update = store.take_update().context("the case has no objects")?;
    reconciler.update(update);
    reconciler.pass();
    let mut lines: Vec<String> = problems
        .into_iter()
        .map(|problem| {
            let file = objects.display().to_string();
            format!(
                "refused {}",
                problem.to_string().replace(&file, "objects.yaml")
            )
        })
        .collect();
    let mut owners = BTreeMap::new();
    for service in reconciler.services() {
        for port in service.ports {
            let mut owner = format!("{}/{}", service.namespace, service.name);
            if !port.port.is_empty() {
                owner = format!("{owner}:{}", port.port);
            }
            if let Some(problem) = port.problem {
                lines.push(format!(
                    "refused {owner}/{} {}: {problem}",
                    port.protocol, port.family
                ));
            }
            owners.extend(port.fronts.into_iter().map(|front| (front, owner.clone())));
        }
    }
    lines.extend(entries(reconciler.maps(), &owners));
    lines.sort();
    Ok(lines)
}

fn entries(maps: &Memory, owners: &BTreeMap<String, String>) -> Vec<String> {
    let mut lines = Vec::new();
    let mut names = BTreeMap::new();
    for (key, index) in &maps.svc {
        let front = maps.front[index];
        let owner = owners.get(&key.to_string()).cloned().unwrap_or_default();
        names.insert(front.service, owner.clone());
        let set = |set: Set| {
            let places = set.base..set.base + set.len;
            let backends = places.map(|place| shown(&maps.be[&maps.slot[&place].backend]));
            backends.collect::<Vec<_>>().join(" ")
        };
        lines.push(format!(
            "svc {key} {owner} {} cluster=[{}] local=[{}]",
            front.algorithm.label(),
            set(front.cluster),
            set(front.local)
        ));
    }
    for backend in maps.be.values() {
        let owner = names.get(&backend.service).cloned().unwrap_or_default();
        let state = if backend.state.is_serving() {
            "serving"
        } else {
            "gone"
        };
        lines.push(format!("be {} {owner} {state}", shown(backend)));
    }
    lines
}

fn shown(backend: &Backend) -> String {
    let key =
        tunnel_common::service::FrontKey::new(backend.address, backend.port, backend.protocol);
    key.to_string()
}

fn check(case: &Path) -> Result<()> {
    let found = program(&case.join("objects.yaml"))?.join("\n");
    let wanted = fs::read_to_string(case.join("maps.txt"))
        .with_context(|| format!("{} has no maps.txt", case.display()))?;
    let name = case
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    ensure!(
        found == wanted.trim_end(),
        "{name}: the maps hold\n{found}\nnot\n{wanted}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn case(name: &str) {
        let cases = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/cases"));
        if let Err(error) = check(&cases.join(name)) {
            panic!("{error:#}");
        }
    }

    /// One test a case, and one that no case is forgotten.
    macro_rules! cases {
        ($($name:ident),+ $(,)?) => {
            $(#[test]
            fn $name() {
                case(stringify!($name));
            })+

            #[test]
            fn every_folder_of_cases_is_a_test() {
                let cases = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/cases");
                let mut folders: Vec<_> = fs::read_dir(cases)
                    .expect("a folder of cases")
                    .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
                    .collect();
                folders.sort();
                assert_eq!(folders, [$(stringify!($name)),+]);
            }
        };
    }

    cases![
        a_bad_document_leaves_the_rest,
        a_cluster_ip_leads_to_its_ready_endpoints,
        a_dual_stack_service_has_a_front_in_each_family,
        a_list_is_read_as_its_items,
        a_named_port_follows_the_numbers_of_its_slices,
        a_service_without_endpoints_refuses,
        an_address_of_two_services_belongs_to_the_older,
        one_port_number_in_two_protocols_is_two_ports,
        round_robin_is_asked_for_by_annotation,
        sctp_is_read_and_not_translated,
        what_is_not_served_is_not_programmed,
        what_only_finishes_serves_but_is_in_no_set,
    ];
}
