use super::*;
use crate::model::{Service, fixture};

fn time(millis: i64) -> Timestamp {
    Timestamp::from_millisecond(1_800_000_000_000 + millis).expect("a time")
}

fn name() -> ObjectName {
    ObjectName::new("shop", "web")
}

fn service(port: u16) -> Arc<Service> {
    Arc::new(Service {
        ports: vec![fixture::http(port)],
        ..Service::named(name())
    })
}

fn slice(slice: &str, family: Family, triggered: Option<i64>) -> Arc<EndpointSlice> {
    Arc::new(EndpointSlice {
        triggered: triggered.map(time),
        ..fixture::slice(slice, &name(), family, &[], Vec::new())
    })
}

fn state(port: u16, slices: &[Arc<EndpointSlice>]) -> ServiceState {
    ServiceState {
        service: service(port),
        slices: slices.to_vec(),
    }
}

/// Records a sync that ended at the time `at`, in milliseconds.
fn sync(recorder: &mut MetricsRecorder, at: i64, is_written: bool) -> &SyncMetrics {
    let took = Duration::from_millis(3);
    recorder.record_sync(took, time(at), |_| !is_written);
    &recorder.metrics
}

#[test]
fn changes_are_counted_by_object_and_family_and_wait_until_they_are_written() {
    let mut recorder = MetricsRecorder::default();
    let first = state(
        80,
        &[
            slice("a", Family::V4, None),
            slice("b", Family::V6, None),
            slice("c", Family::V6, None),
        ],
    );
    let same = state(80, &first.slices);
    let changed = state(81, &first.slices);
    let without_slice = state(
        81,
        &[
            slice("a", Family::V4, None),
            slice("b", Family::V6, Some(1)),
        ],
    );

    recorder.record_change(&name(), None, Some(&first));
    recorder.record_change(&name(), Some(&first), Some(&same));
    recorder.record_change(&name(), Some(&same), Some(&changed));
    let stats = sync(&mut recorder, 0, false);
    assert_eq!(stats.service_changes, 2);
    assert_eq!(stats.endpoint_changes, PerFamily { v4: 1, v6: 2 });
    assert_eq!(stats.pending_services, 1);
    assert_eq!(stats.pending_endpoints, PerFamily { v4: 1, v6: 1 });

    // One slice is deleted, and another one is changed.
    recorder.record_change(&name(), Some(&changed), Some(&without_slice));
    let stats = sync(&mut recorder, 0, true);
    assert_eq!(stats.service_changes, 2);
    assert_eq!(stats.endpoint_changes, PerFamily { v4: 1, v6: 4 });
    assert_eq!(stats.pending_services, 0);
    assert_eq!(stats.pending_endpoints, PerFamily { v4: 0, v6: 0 });
    recorder.record_change(&name(), Some(&without_slice), None);
    let stats = sync(&mut recorder, 0, true);
    assert_eq!(stats.service_changes, 3);
    assert_eq!(stats.endpoint_changes, PerFamily { v4: 2, v6: 5 });
}

#[test]
fn programming_latency_is_measured_from_the_change_of_a_pod_to_its_write() {
    for family in [Family::V4, Family::V6] {
        let mut recorder = MetricsRecorder::default();
        let at = |millis| state(80, &[slice("a", family, Some(millis))]);
        let measured = |stats: &SyncMetrics| {
            let histogram = stats.programming_latency.get(family);
            (histogram.count(), histogram.sum)
        };
        recorder.record_change(&name(), None, Some(&at(500)));
        sync(&mut recorder, 1000, true);
        // The latency of a change made before the end of the first sync is not measured.
        recorder.record_change(&name(), Some(&at(500)), Some(&at(900)));
        assert_eq!(measured(sync(&mut recorder, 1100, true)).0, 0);

        recorder.record_change(&name(), Some(&at(900)), Some(&at(2000)));
        assert_eq!(measured(sync(&mut recorder, 2100, false)).0, 0);
        let (count, sum) = measured(sync(&mut recorder, 2400, true));
        assert_eq!(count, 1);
        assert!((sum - 0.4).abs() < 1e-9, "{sum}");

        // The time of a deletion is unknown, so its latency is not measured.
        recorder.record_change(&name(), Some(&at(2000)), Some(&at(3000)));
        recorder.record_change(&name(), Some(&at(3000)), None);
        assert_eq!(measured(sync(&mut recorder, 3100, true)).0, 1);
    }
}

#[test]
fn the_first_sync_and_those_after_a_full_replan_are_full() {
    let mut recorder = MetricsRecorder::default();
    let counts =
        |stats: &SyncMetrics| [&stats.all, &stats.full, &stats.partial].map(Histogram::count);

    assert_eq!(counts(sync(&mut recorder, 0, true)), [1, 1, 0]);
    assert_eq!(counts(sync(&mut recorder, 1, true)), [2, 1, 1]);
    recorder.is_full = true;
    let stats = sync(&mut recorder, 2, true);
    assert_eq!(counts(stats), [3, 2, 1]);
    assert!((stats.all.sum - 0.009).abs() < 1e-9);
}

#[test]
fn buckets_are_those_of_kube_proxy() {
    let stats = SyncMetrics::default();
    let bounds = |histogram: &Histogram| {
        let buckets = histogram.buckets.iter();
        buckets.map(|(bound, _)| *bound).collect::<Vec<_>>()
    };
    let ends = |bounds: &[f64]| {
        (
            bounds.len(),
            bounds.first().copied(),
            bounds.last().copied(),
        )
    };

    let sync_bounds = bounds(&stats.all);
    assert_eq!(ends(&sync_bounds), (16, Some(0.001), Some(f64::INFINITY)));
    assert_eq!(sync_bounds.get(14), Some(&16.384));
    let programming = bounds(&stats.programming_latency.v4);
    assert_eq!(ends(&programming), (81, Some(0.25), Some(f64::INFINITY)));
    assert_eq!(
        programming.get(58..64),
        Some(&[57.0, 58.0, 59.0, 60.0, 65.0, 70.0][..])
    );
    assert_eq!(programming.get(72..75), Some(&[115.0, 120.0, 150.0][..]));
}
