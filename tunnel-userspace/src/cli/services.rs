use super::table;
use crate::reconcile::{PortView, ServiceView};

/// How many backends a line names.
const NAMED: usize = 3;

pub(super) fn render(services: &Vec<ServiceView>) -> String {
    let mut rows = Vec::new();
    for service in services {
        let mut name = format!("{}/{}", service.namespace, service.name);
        if service.ports.is_empty() {
            let nothing = "no port is translated at sockets".to_owned();
            rows.push(vec![
                name,
                String::new(),
                String::new(),
                String::new(),
                nothing,
            ]);
            continue;
        }
        for port in &service.ports {
            let shown = std::mem::take(&mut name);
            rows.push(vec![
                shown,
                port.fronts.join(" "),
                port.algorithm.clone(),
                backends(port),
                state(port),
            ]);
        }
    }
    table::render(&["SERVICE", "FRONT", "CHOICE", "BACKENDS", "STATE"], &rows)
}

fn backends(port: &PortView) -> String {
    let mut words: Vec<_> = port.backends.iter().take(NAMED).cloned().collect();
    let more = port.backends.len().saturating_sub(NAMED);
    if more > 0 {
        words.push(format!("and {more} more"));
    }
    if words.is_empty() {
        "-".to_owned()
    } else {
        words.join(" ")
    }
}

fn state(port: &PortView) -> String {
    if let Some(problem) = &port.problem {
        return format!("refused: {problem}");
    }
    if port.fronts.is_empty() {
        return "not programmed yet".to_owned();
    }
    if port.backends.is_empty() {
        return "no backend: connects are refused".to_owned();
    }
    match port.leaving.len() {
        0 => "programmed".to_owned(),
        leaving => format!("programmed, {leaving} leaving"),
    }
}
