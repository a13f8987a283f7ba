use jiff::ToSpan as _;
use rcgen::KeyPair;

use super::*;
use crate::identity::Role;

const SETTINGS: CaSettings = CaSettings {
    ca_life: SignedDuration::from_hours(3650 * 24),
    overlap: SignedDuration::from_hours(7 * 24),
    life: SignedDuration::from_hours(30 * 24),
};

fn start() -> Timestamp {
    "2026-11-30T12:00:00Z".parse().expect("a time")
}

fn days(days: i64) -> SignedDuration {
    SignedDuration::from_hours(24 * days)
}

/// The Secret, and the number of changes of it.
struct Model {
    data: CaData,
    must_renew: bool,
    published: String,
    now: Timestamp,
}

impl Model {
    fn new() -> Self {
        Self {
            data: CaData::new(),
            must_renew: false,
            published: String::new(),
            now: start(),
        }
    }

    /// Makes all changes that are due. Returns the reasons, the name of the CA that signs, and the number of those that are
    /// trusted.
    fn settle(&mut self) -> (Vec<&'static str>, String, usize) {
        let mut changes = Vec::new();
        loop {
            let published = self.published.clone();
            let plan = plan(&self.data, self.must_renew, &published, &SETTINGS, self.now);
            let plan = plan.expect("a plan");
            match plan {
                Plan::Replace {
                    data,
                    why,
                    is_renewal,
                } => {
                    self.data = data;
                    self.must_renew &= !is_renewal;
                    changes.push(why);
                    assert!(changes.len() < 5, "{changes:?}");
                }
                Plan::Use { authority, trust } if trust != self.published => {
                    drop(authority);
                    self.published = trust;
                }
                Plan::Use { authority, trust } => {
                    let certificates = trust.matches("BEGIN CERTIFICATE").count();
                    let own = certificates_in(&authority.cert_pem());
                    assert!(trust.contains(&own));
                    return (changes, authority.cert_pem(), certificates);
                }
            }
        }
    }

    fn after(&mut self, elapsed: SignedDuration) -> (Vec<&'static str>, String, usize) {
        self.now += elapsed;
        self.settle()
    }

    fn error(&self) -> String {
        match plan(&self.data, self.must_renew, "", &SETTINGS, self.now) {
            Ok(_) => panic!("it must be refused"),
            Err(error) => crate::error_chain::chain(&error),
        }
    }
}

#[test]
fn a_ca_is_created_where_there_is_none_and_stays() {
    let mut model = Model::new();
    let (changes, first, trusted) = model.settle();

    assert_eq!(changes, ["there was no CA"]);
    assert_eq!(trusted, 1);
    assert_eq!(model.settle(), (vec![], first.clone(), 1));
    assert_eq!(model.after(days(2000)), (vec![], first, 1));
}

#[test]
fn a_ca_changes_with_overlap_when_a_third_of_its_life_is_left() {
    let mut model = Model::new();
    let (_, first, _) = model.settle();

    let (changes, signer, trusted) = model.after(days(2434));
    assert_eq!(
        changes,
        ["the next CA was created", "the next CA is published"]
    );
    assert_eq!((signer, trusted), (first.clone(), 2));
    assert_eq!(model.after(days(6)), (vec![], first.clone(), 2));

    let (changes, second, trusted) = model.after(days(1));
    assert_eq!(changes, ["the next CA signs from now on"]);
    assert_ne!(second, first);
    assert_eq!(trusted, 2);

    // A certificate of the first CA may have been issued in the last moment.
    assert_eq!(model.after(days(30)), (vec![], second.clone(), 2));
    let (changes, signer, trusted) = model.after(days(1));
    assert_eq!(changes.len(), 1);
    assert_eq!((signer, trusted), (second, 1));
}

#[test]
fn a_change_that_is_asked_for_happens_once() {
    let mut model = Model::new();
    let (_, first, _) = model.settle();
    model.must_renew = true;

    assert_eq!(model.settle().2, 2);
    assert!(!model.must_renew);
    // Another one while the next CA waits changes nothing.
    let data = model.data.clone();
    model.must_renew = true;
    model.settle();
    assert_eq!(model.data, data);
    let (_, second, _) = model.after(days(7));
    assert_ne!(second, first);
    // The old CA is still trusted while another one begins.
    model.must_renew = true;
    assert_eq!(model.settle().2, 3);
    let (_, third, trusted) = model.after(days(7));
    assert_eq!(trusted, 3);
    assert_eq!(model.after(days(31)).1, third);
    assert_eq!(model.settle().2, 1);
}

#[test]
fn the_clock_may_be_set_back() {
    let mut model = Model::new();
    let (_, first, _) = model.settle();
    model.must_renew = true;
    model.settle();

    model.now -= 30.minutes();
    assert_eq!(model.settle(), (vec![], first, 2));
}

#[test]
fn the_old_ca_is_trusted_for_the_longest_life_of_its_certificates() {
    let mut model = Model::new();
    model.settle();
    let short = CaSettings {
        life: days(1),
        ..SETTINGS
    };
    model.must_renew = true;
    model.settle();
    model.now += days(7);
    let plan_for = |data: &CaData, now| plan(data, false, &model.published, &short, now);
    let Ok(Plan::Replace { data, .. }) = plan_for(&model.data, model.now) else {
        panic!("it must change");
    };
    assert!(matches!(
        plan_for(&data, model.now + days(29)),
        Ok(Plan::Use { trust, .. }) if trust.matches("BEGIN CERTIFICATE").count() == 2
    ));
}

#[test]
fn a_bad_ca_is_named_and_replaced_only_if_that_is_asked_for() {
    let mut good = Model::new();
    good.settle();
    let mut other = Model::new();
    other.settle();
    let broken = |key: &str, value: &[u8]| {
        let mut model = Model::new();
        model.data = good.data.clone();
        model.data.insert(key.to_owned(), value.to_vec());
        model
    };
    // Certificates that the CA has signed remain valid if its own certificate is known.
    for (mut model, text, trusted) in [
        (broken(CERT, b""), "ca.pem", 1),
        (broken(CERT, b"nonsense"), "ca.pem", 1),
        (broken(KEY, b""), "ca-key.pem", 2),
        (
            broken(KEY, &other.data[KEY]),
            "has no certificate for the private key",
            2,
        ),
    ] {
        let error = model.error();
        assert!(error.contains(text), "{error}");
        model.must_renew = true;
        assert_eq!(model.settle().2, trusted);
    }
    let mut early = Model::new();
    early.data = good.data.clone();
    early.now -= days(1);
    early.must_renew = true;
    assert!(early.error().contains("valid from"), "{}", early.error());
    let mut expired = Model::new();
    expired.data = good.data.clone();
    expired.now += days(3651);
    assert!(
        expired.error().contains("valid from"),
        "{}",
        expired.error()
    );
    for (key, value) in [(NEXT_CERT, "x"), (OLD_CERTS, "x"), (LONGEST_LIFE, "x")] {
        let mut model = broken(key, value.as_bytes());
        if key == OLD_CERTS {
            model.data.insert(OLD_UNTIL.to_owned(), b"soon".to_vec());
        }
        let named = if key == OLD_CERTS { OLD_UNTIL } else { key };
        assert!(model.error().contains(named), "{}", model.error());
    }
}

#[test]
fn certificates_that_were_issued_by_hand_are_trusted_as_long_as_their_ca_lives() {
    let mut model = Model::new();
    model.settle();
    // As after `culvert ca init`, with the key next to the certificate.
    let mut cert = model.data[CERT].clone();
    cert.extend_from_slice(&model.data[KEY]);
    model.data.insert(CERT.to_owned(), cert);
    model.data.remove(LONGEST_LIFE);
    model.must_renew = true;
    model.settle();
    assert!(!model.published.contains("PRIVATE KEY"));

    assert_eq!(model.after(days(7)).2, 2);
    assert_eq!(model.after(days(1000)).2, 2);
}

#[test]
fn the_overlap_begins_when_the_next_ca_is_published() {
    let mut model = Model::new();
    let (_, first, _) = model.settle();
    model.must_renew = true;
    let created = plan(&model.data, true, &model.published, &SETTINGS, model.now);
    let Ok(Plan::Replace { data, .. }) = created else {
        panic!("it must be created");
    };
    (model.data, model.must_renew) = (data, false);

    // No controller runs for some time.
    assert_eq!(model.after(days(100)).1, first);
    assert_eq!(model.after(days(6)).1, first);
    assert_ne!(model.after(days(1)).1, first);
}

#[test]
fn a_damaged_next_ca_is_replaced_if_that_is_asked_for() {
    let mut model = Model::new();
    model.settle();
    model.data.insert(NEXT_CERT.to_owned(), b"x".to_vec());
    assert!(model.error().contains("next-ca.pem"), "{}", model.error());

    model.must_renew = true;
    assert_eq!(model.settle().2, 2);
}

#[test]
fn a_secret_that_was_emptied_keeps_the_trust_in_the_cas_that_are_published() {
    let mut model = Model::new();
    let (_, first, _) = model.settle();
    model.must_renew = true;
    model.settle();
    model
        .published
        .push_str("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n");
    model.data = CaData::new();

    let (changes, signer, trusted) = model.settle();

    assert_eq!(changes, ["there was no CA"]);
    assert_ne!(signer, first);
    assert_eq!(trusted, 3, "without the damaged one");
    assert!(model.published.contains(&certificates_in(&first)));
    assert_eq!(model.after(days(30)).2, 3);
    assert_eq!(model.after(days(1)).2, 1);
}

#[test]
fn a_certificate_that_no_end_would_trust_is_not_published() {
    let mut model = Model::new();
    model.settle();
    let current = model.data[CERT].clone();
    let authority = read(&model.data, (CERT, KEY)).expect("a CA");
    let (key, until) = (KeyPair::generate().expect("a key"), model.now + days(1));
    let leaf = authority.certify(&key, Role::Agent, "a", (model.now, until));
    let leaf = leaf.expect("a certificate");
    let with_leaf = [&current[..], leaf.as_bytes()].concat();
    for (key, value) in [(CERT, &with_leaf), (OLD_CERTS, &with_leaf)] {
        let mut model = Model {
            data: model.data.clone(),
            ..Model::new()
        };
        model.data.insert(key.to_owned(), value.clone());
        let until = (model.now + days(9)).to_string();
        model.data.insert(OLD_UNTIL.to_owned(), until.into_bytes());
        assert!(model.error().contains(key), "{}", model.error());
    }
}
