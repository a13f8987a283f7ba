use core::{cell::Cell, convert::Infallible};

use super::*;
use crate::{
    addr::{Address, Port, Protocol},
    decide::tests::record,
};

fn key(port: u16) -> FrontendKey {
    let address = Address::from_ip([10, 96, 0, 10].into());
    FrontendKey::new(address, Port::from_host(port), Protocol::TCP)
}

/// Looks up the key for port 80. Also returns how many times the index was read. Successive reads return the
/// elements of `indices`, and after that keep returning the last one. Record 1 has the key, record 0 has
/// another key, and there are no other records.
fn found(indices: &[Option<u32>]) -> (Lookup<(u32, Frontend)>, usize) {
    let reads = Cell::new(0);
    let Ok::<_, Infallible>(found) = look_up(
        &key(80),
        |_| {
            let index = indices.get(reads.replace(reads.get() + 1));
            Ok(*index.or_else(|| indices.last()).expect("an index"))
        },
        |index| {
            let records = [record(key(81)), record(key(80))];
            Ok(records.into_iter().nth(index as usize))
        },
    );
    (found, reads.get())
}

#[test]
fn a_key_is_looked_up_up_to_four_times_or_until_two_reads_miss_it() {
    let ours = Lookup::Found((1, record(key(80))));
    let stale = |times| [vec![Some(0); times], vec![Some(1)]].concat();
    for (claim, indices, wanted, reads) in [
        ("a record with the key", stale(0), ours, 1),
        ("a stale index", stale(1), ours, 2),
        ("two stale ones", stale(2), ours, 3),
        ("three stale ones", stale(3), ours, 4),
        ("four stale ones", stale(4), Lookup::Unstable, 4),
        ("no such record", vec![Some(9), Some(1)], ours, 2),
        ("never a record", vec![Some(9)], Lookup::Unstable, 4),
        ("never an index", vec![None], Lookup::None, 2),
        ("an index at last", vec![None, Some(1)], ours, 2),
        ("no index again", vec![Some(0), None], Lookup::None, 3),
    ] {
        assert_eq!(found(&indices), (wanted, reads), "{claim}");
    }
}

#[test]
fn an_error_of_a_map_ends_the_lookup() {
    let none = look_up(&key(80), |_| Err("unreadable"), |_| Ok(None::<Frontend>));

    assert_eq!(none, Err("unreadable"));
}
