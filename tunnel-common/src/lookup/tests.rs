use core::{cell::Cell, convert::Infallible};

use super::*;
use crate::{
    addr::{Address, Port, Protocol},
    decide::tests::record,
};

fn key(port: u16) -> FrontKey {
    let address = Address::from_ip([10, 96, 0, 10].into());
    FrontKey::new(address, Port::from_host(port), Protocol::TCP)
}

/// Looks up the key of port 80. Each look meets the next of `indices`, then the last for ever; record
/// 1 is that of the key, 0 is another's, and there are no others. Also tells how many looks there were.
fn found(indices: &[Option<u32>]) -> (Lookup<(u32, Front)>, usize) {
    let looks = Cell::new(0);
    let Ok::<_, Infallible>(found) = look_up(
        &key(80),
        |_| {
            let look = looks.replace(looks.get() + 1);
            Ok(*indices
                .get(look)
                .or_else(|| indices.last())
                .expect("an index"))
        },
        |index| {
            Ok([record(key(81)), record(key(80))]
                .into_iter()
                .nth(index as usize))
        },
    );
    (found, looks.get())
}

#[test]
fn a_record_that_echoes_the_key_is_found_at_the_first_look() {
    assert_eq!(found(&[Some(1)]), (Lookup::Found((1, record(key(80)))), 1));
}

#[test]
fn a_stale_index_is_looked_up_again_up_to_four_times() {
    for stale in 0..4 {
        let indices: Vec<_> = [Some(0)]
            .repeat(stale)
            .into_iter()
            .chain([Some(1)])
            .collect();

        assert_eq!(
            found(&indices),
            (Lookup::Found((1, record(key(80)))), stale + 1)
        );
    }
    let indices = [[Some(0)].repeat(4), vec![Some(1)]].concat();

    assert_eq!(found(&indices), (Lookup::Unstable, 4));
}

#[test]
fn an_index_beyond_the_records_is_looked_up_again_too() {
    assert_eq!(
        found(&[Some(9), Some(1)]).0,
        Lookup::Found((1, record(key(80))))
    );
    assert_eq!(found(&[Some(9)]), (Lookup::Unstable, 4));
}

#[test]
fn a_key_is_absent_when_two_looks_miss_it() {
    assert_eq!(found(&[None]), (Lookup::None, 2));
    assert_eq!(
        found(&[None, Some(1)]),
        (Lookup::Found((1, record(key(80)))), 2)
    );
    assert_eq!(found(&[Some(0), None, None]), (Lookup::None, 3));
}

#[test]
fn an_error_of_the_tables_ends_the_look_up() {
    let none = look_up(&key(80), |_| Err("away"), |_| Ok(None::<Front>));

    assert_eq!(none, Err("away"));
}
