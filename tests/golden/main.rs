//! Golden tests, which load nothing into the kernel. Each case is a directory that contains Kubernetes
//! objects and the expected map entries.
//!
//! The objects are read and programmed as on a node, but into maps in memory. The result is a sorted list of
//! lines, with names instead of indices: map entries, refused objects, and responses from health check ports.
//! A case may have a `config.yaml` that sets `service.externalIPs`, `service.nodeAddresses`,
//! `service.topologyKeys` and `service.nodePortAddresses`. Without it, node ports are served on all addresses.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_common::{
    decide::Traffic,
    service::{Backend, Frontend, FrontendKey, IndexRange},
};
use tunnel_userspace::{
    config::{self, Config},
    model::{Algorithm, ClusterUpdate},
    plan::NodePortAddresses,
    reconcile::{
        CounterReader, GracePeriod, MapReader, MapSizes, MapWriter, PlanSettings, ReadError,
        Reconciler, ServiceView, WriteError,
    },
    source::file,
};

#[cfg(test)]
mod deploy_manifests;
#[path = "../../tunnel-userspace/src/reconcile/tests/memory_maps.rs"]
mod memory;
#[cfg(test)]
mod packets;
#[cfg(test)]
mod random_clusters;
#[cfg(test)]
mod reference_model;

use memory::Memory;

const SIZES: MapSizes = MapSizes {
    frontends: 1024,
    slots: 2048,
    backends: 1024,
    ..MapSizes::uniform(64)
};

/// The addresses that the node has in every case.
const ADDRESSES: [IpAddr; 6] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7)),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7)),
];

struct NoGrace;

impl GracePeriod for NoGrace {
    fn wait(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Applies an update to new maps in memory, as on a node with the given addresses.
fn programmed(
    settings: PlanSettings,
    addresses: &[IpAddr],
    update: ClusterUpdate,
) -> Result<Reconciler<Memory>> {
    let mut maps = Memory::new(SIZES);
    maps.end_grace_period();
    let mut reconciler = Reconciler::adopt(maps, SIZES, &NoGrace, settings)?;
    reconciler.set_addresses(addresses.iter().copied().collect());
    reconciler.update(update);
    reconciler.write_changes();
    Ok(reconciler)
}

/// Programs the objects in a case, and returns the result as sorted lines.
fn program(objects: &Path) -> Result<Vec<String>> {
    let (update, problems) = file::read(objects)?;
    let path = objects.with_file_name("config.yaml");
    let (config, node_ports) = if path.exists() {
        let config = Config::read(&path)?.service;
        let node_ports = config.node_ports();
        (config, node_ports)
    } else {
        (
            config::ServiceConfig::default(),
            vec![NodePortAddresses::All],
        )
    };
    let settings = PlanSettings {
        node_name: "node-a".to_owned(),
        algorithm: Algorithm::Random,
        node_port_addresses: node_ports,
        external_ips: config.external_ips,
        node_addresses: config.node_addresses,
        translates_packets: true,
        local_listeners: [0].into(),
        topology_keys: config.topology_keys,
        namespace_share: config.namespace_share,
    };
    let reconciler = programmed(settings, &ADDRESSES, update)?;
    let mut lines = Vec::new();
    for problem in problems {
        let word = if problem.ignored {
            "ignored"
        } else {
            "refused"
        };
        let file = objects.display().to_string();
        let problem = problem.to_string().replace(&file, "objects.yaml");
        lines.push(format!("{word} {problem}"));
    }
    let mut owner_names = BTreeMap::new();
    let maps = reconciler.maps();
    let services = ServiceView::collect(reconciler.published().service_parts(maps, None));
    for service in services {
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
            let frontends = port.frontends.into_iter().map(|frontend| frontend.frontend);
            owner_names.extend(frontends.map(|frontend| (frontend, owner.clone())));
        }
    }
    let checks = reconciler.health().unwrap_or_default();
    for (name, check) in &checks.services {
        let counts = check.ready_endpoints.iter();
        let counts: String = counts
            .map(|(family, n)| format!(" {}={n}", family.label()))
            .collect();
        lines.push(format!("health {} {name}{counts}", check.port));
    }
    let misplaced = reconciler.maps().wrong_memberships();
    ensure!(
        misplaced.is_empty(),
        "backends {misplaced:?} are not in the backend sets that their entries name"
    );
    lines.extend(entries(reconciler.maps(), &owner_names));
    lines.sort();
    Ok(lines)
}

fn entries(maps: &Memory, owner_names: &BTreeMap<String, String>) -> Vec<String> {
    let mut lines = Vec::new();
    let mut names = BTreeMap::new();
    for (key, index) in &maps.frontend_keys {
        let frontend = maps.frontends[index];
        let owner = owner_names
            .get(&key.to_string())
            .cloned()
            .unwrap_or_default();
        names.insert(frontend.service, owner.clone());
        let set = |set: IndexRange| {
            let slots = set.base..set.base + set.len;
            let backends =
                slots.map(|slot| format_backend(&maps.backends[&maps.slots[&slot].backend]));
            backends.collect::<Vec<_>>().join(" ")
        };
        lines.push(format!(
            "services {key} {owner} {} cluster=[{}] local=[{}]{}{}",
            frontend.algorithm.label(),
            set(frontend.cluster),
            set(frontend.local),
            policies(&frontend),
            sources(maps, &frontend)
        ));
    }
    for backend in maps.backends.values() {
        let owner = names.get(&backend.service).cloned().unwrap_or_default();
        let state = if backend.state.is_serving() {
            "serving"
        } else {
            "gone"
        };
        lines.push(format!(
            "backends {} {owner} {state}",
            format_backend(backend)
        ));
    }
    lines
}

/// Formats a frontend's policies: for which kinds of traffic only local endpoints are used (with `(lead
/// nowhere)` if there are none, but other nodes have endpoints), the timeout for session affinity, and
/// whether the frontend does not apply to sockets.
fn policies(frontend: &Frontend) -> String {
    let mut words = String::new();
    for (traffic, flag, kind) in [
        (Traffic::Sockets, Frontend::SOCKETS_LOCAL, "sockets"),
        (Traffic::Packets, Frontend::PACKETS_LOCAL, "packets"),
    ] {
        if frontend.flags & flag == 0 {
            continue;
        }
        let is_lost =
            traffic.set(frontend).len == 0 && frontend.flags & Frontend::HAS_ENDPOINTS != 0;
        let end = if is_lost { " (lead nowhere)" } else { "" };
        words.push_str(&format!(" {kind}=local{end}"));
    }
    if frontend.affinity_timeout > 0 {
        words.push_str(&format!(" affinity={}", frontend.affinity_timeout));
    }
    if frontend.flags & Frontend::NOT_SOCKETS != 0 {
        words.push_str(" not for sockets");
    }
    words
}

/// Formats a frontend's source ranges. Returns an empty string if there are none.
fn sources(maps: &Memory, frontend: &Frontend) -> String {
    let slots =
        frontend.source_ranges.base..frontend.source_ranges.base + frontend.source_ranges.len;
    let ranges = slots.map(|slot| {
        let range = maps.source_ranges[&slot];
        format!("{}-{}", range.first, range.last)
    });
    let mut ranges: Vec<_> = ranges.collect();
    if ranges.is_empty() {
        return String::new();
    }
    if frontend.flags & Frontend::ADMITS_HOST != 0 {
        ranges.push("the host".to_owned());
    }
    format!(" from=[{}]", ranges.join(" "))
}

fn format_backend(backend: &Backend) -> String {
    FrontendKey::new(backend.address, backend.port, backend.protocol).to_string()
}

fn check(case: &Path) -> Result<()> {
    let found = program(&case.join("objects.yaml"))?.join("\n");
    let wanted = fs::read_to_string(case.join("maps.txt"))
        .with_context(|| format!("{} has no maps.txt", case.display()))?;
    ensure!(
        found == wanted.trim_end(),
        "{}: the result is\n{found}\nexpected\n{wanted}",
        case.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn case(name: &str) {
        let cases = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/cases"));
        let case = cases.join(name);
        if let Err(error) = check(&case) {
            panic!("{error:#}");
        }
        if let Err(error) = reference_model::check(&case) {
            panic!("{name}: the reference model: {error:#}");
        }
    }

    /// Generates a test for each case, and a test that checks that every directory in `golden/cases` is
    /// listed.
    macro_rules! cases {
        ($($name:ident),+ $(,)?) => {
            $(#[test]
            fn $name() {
                case(stringify!($name));
            })+

            #[test]
            fn every_directory_of_cases_has_a_test() {
                let cases = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/cases");
                let mut directories: Vec<_> = fs::read_dir(cases)
                    .expect("a directory of cases")
                    .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
                    .collect();
                directories.sort();
                assert_eq!(directories, [$(stringify!($name)),+]);
            }
        };
    }

    #[test]
    fn the_page_on_services_names_only_existing_tests() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let page = fs::read_to_string(root.join("../docs/service-semantics.md")).expect("a page");
        let (_, tested) = page
            .split_once("## Where each rule is tested")
            .expect("a section");
        let text: String = ["netns", "../tunnel-userspace/src", "../tunnel-common/src"]
            .into_iter()
            .flat_map(|directory| {
                deploy_manifests::files(&root.join(directory), "rs").expect("a directory")
            })
            .map(|path| fs::read_to_string(path).expect("text"))
            .collect();
        let is_test = |name: &&str| name.matches('_').count() > 2;
        let is_there = |name: &&str| {
            text.contains(&format!("fn {name}(")) || root.join("golden/cases").join(name).is_dir()
        };

        // The page encloses the names of tests in backticks.
        let named = tested.split('`').skip(1).step_by(2);
        let named: Vec<_> = named.filter(is_test).collect();

        assert!(named.len() > 50);
        let missing: Vec<_> = named.iter().filter(|name| !is_there(name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    cases![
        a_bad_document_leaves_the_rest,
        a_client_keeps_its_backend_at_every_address_of_the_service,
        a_cluster_ip_goes_before_other_addresses_of_older_services,
        a_cluster_ip_leads_to_its_ready_endpoints,
        a_dual_stack_service_has_a_front_in_each_family,
        a_list_is_read_as_its_items,
        a_load_balancer_may_have_no_node_ports,
        a_named_port_follows_the_numbers_of_its_slices,
        a_node_in_the_source_ranges_may_use_an_address_that_it_has_itself,
        a_node_port_is_served_at_a_load_balancers_address_that_the_node_has,
        a_node_port_is_served_for_every_type_of_service,
        a_node_port_is_served_on_the_addresses_of_the_node,
        a_node_without_a_pool_uses_only_its_own_endpoints,
        a_service_without_endpoints_refuses,
        addresses_that_belong_to_each_host_itself_are_not_served,
        addresses_with_leading_zeros_are_decimal,
        an_address_of_the_node_is_not_served_for_a_service,
        an_address_of_two_services_belongs_to_the_older,
        an_address_of_two_services_is_assigned_by_kind_then_age_then_name,
        an_address_that_a_load_balancer_gives_to_the_node_is_served,
        an_endpoint_in_two_slices_is_the_one_that_does_not_terminate,
        an_endpoint_port_is_found_by_name_and_protocol,
        clients_keep_their_backend_for_three_hours_by_default,
        endpoints_come_from_slices_that_name_the_service_in_its_namespace_and_family,
        endpoints_excluded_by_topology_keys_are_ignored_by_every_rule,
        endpoints_that_are_only_serving_are_in_no_set,
        external_ips_and_vips_of_load_balancers_are_served_and_proxied_ones_left_alone,
        health_checks_count_each_address_once_over_all_ports,
        health_checks_count_the_ready_endpoints_of_this_node_in_each_family,
        health_checks_do_not_count_terminating_endpoints,
        hints_for_the_zone_of_this_node_leave_out_the_others,
        hints_for_this_node_have_precedence_over_those_for_its_zone,
        least_conn_is_selected_by_a_name_of_ipvs,
        node_ports_are_on_all_addresses_if_the_list_is_empty,
        node_ports_are_on_all_addresses_of_a_family_that_the_config_does_not_name,
        node_ports_are_on_the_primary_addresses_and_loopback_by_default,
        node_ports_are_on_the_ranges_of_the_config_in_each_family,
        node_ports_are_only_on_loopback_if_the_config_says_so,
        node_ports_are_only_on_the_primary_addresses_if_the_config_says_so,
        omitted_conditions_mean_ready_and_not_terminating,
        one_port_number_in_two_protocols_is_two_ports,
        one_ready_endpoint_without_hints_disables_all_hints,
        only_its_source_ranges_may_use_the_addresses_of_a_load_balancer,
        other_addresses_are_served_in_the_families_of_the_cluster_ips,
        ports_that_a_service_lacks_are_not_programmed,
        round_robin_is_selected_by_annotation,
        sctp_is_programmed_for_packets,
        services_share_an_address_of_a_load_balancer_by_port_and_protocol,
        services_that_are_not_proxied_are_not_programmed,
        slices_with_a_proxy_name_count_and_headless_ones_do_not,
        sockets_ignore_a_service_with_the_annotation_for_that,
        source_ranges_are_of_an_address_port_and_protocol,
        source_ranges_of_another_family_or_of_everything_restrict_nothing,
        terminating_endpoints_of_this_node_take_over_for_the_policy_local,
        terminating_endpoints_take_over_whatever_their_hints,
        terminating_endpoints_take_over_where_no_other_is_ready,
        the_external_policy_local_is_for_packets_from_outside,
        the_external_policy_local_leads_nowhere_without_an_endpoint_of_this_node,
        the_external_policy_means_nothing_without_an_external_address,
        the_field_traffic_distribution_and_topology_annotations_are_ignored,
        the_internal_policy_local_keeps_to_endpoints_of_this_node,
        the_internal_policy_local_leads_nowhere_without_an_endpoint_of_this_node,
        the_internal_policy_means_nothing_for_other_addresses_than_the_cluster_ip,
        the_policy_cluster_has_no_health_check_port,
        the_policy_local_ignores_hints,
        the_source_is_checked_before_the_endpoints,
        topology_keys_apply_only_if_the_config_honours_them,
        topology_keys_keep_to_endpoints_of_this_node,
        topology_keys_keep_to_endpoints_of_this_node_pool,
        unknown_topology_keys_exclude_no_endpoint,
        unowned_external_ips_are_left_out_if_they_must_be_owned,
        unusable_items_of_a_service_are_left_out,
        weights_are_slots,
        without_endpoints_every_address_of_a_service_refuses,
        zone_hints_are_ignored_on_a_node_without_a_zone,
    ];
}
