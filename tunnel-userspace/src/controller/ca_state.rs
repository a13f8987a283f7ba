//! The state of the CA in its Secret, and the next change of it (no I/O). The CA changes with overlap: the next CA is published
//! beside the current one, signs once every end trusts it, and the old one is trusted until the last certificate that it signed
//! has expired.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use jiff::{SignedDuration, Timestamp};

use crate::identity::ca::{Authority, CaError, check_cas};

/// The keys of the Secret's data. The first two are those of `culvert ca init`.
const CERT: &str = "ca.pem";
const KEY: &str = "ca-key.pem";
const NEXT_CERT: &str = "next-ca.pem";
const NEXT_KEY: &str = "next-ca-key.pem";
/// The time since which the next CA has been published.
const NEXT_SINCE: &str = "next-since";
/// The certificates of CAs that sign no more but are trusted.
const OLD_CERTS: &str = "old-ca.pem";
/// The time until which they are trusted.
const OLD_UNTIL: &str = "old-until";
/// The longest life of the certificates that the current CA has signed, in seconds.
const LONGEST_LIFE: &str = "longest-life";

/// The time for which the old CA remains trusted beyond the life of its last certificate. A controller that was stopped in the
/// middle may sign a little later than it has read the Secret.
const SLACK: SignedDuration = SignedDuration::from_mins(10);

/// The data of the Secret.
pub type CaData = BTreeMap<String, Vec<u8>>;

/// The settings for the CA.
#[derive(Clone, Copy, Debug)]
pub struct CaSettings {
    /// The life of a CA.
    pub ca_life: SignedDuration,
    /// The time between the publication of a CA and its first signature.
    pub overlap: SignedDuration,
    /// The maximum life of the certificates that are signed.
    pub life: SignedDuration,
}

/// The next step with the Secret.
pub enum Plan {
    /// The Secret gets other data. Then the next plan is made.
    Replace {
        /// The data.
        data: CaData,
        /// The reason, for the log.
        why: &'static str,
        /// True if this answers the request for a new CA.
        is_renewal: bool,
    },
    /// The Secret needs no change.
    Use {
        /// The CA that signs.
        authority: Box<Authority>,
        /// The certificates of all trusted CAs, as PEM.
        trust: String,
    },
}

/// The error for a Secret that can't be used. It is never replaced unless that is asked for.
#[derive(Debug, thiserror::Error)]
pub enum CaStateError {
    /// The current CA can't be used.
    #[error("the CA in the Secret can't be used")]
    Current(#[source] CaError),
    /// The next CA can't be used.
    #[error("the next CA in the Secret can't be used")]
    Next(#[source] CaError),
    /// A certificate of an old CA can't be used.
    #[error("the old CAs in the Secret can't be trusted")]
    Old(#[source] CaError),
    /// A new CA can't be created.
    #[error("a CA can't be created")]
    Create(#[source] CaError),
    /// A value can't be read.
    #[error("the value `{key}` in the Secret is not {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The kind of value that is expected.
        expected: &'static str,
    },
}

/// Decides what is to be done with the Secret. `must_renew` is true if the Secret asks for a new CA, and `published` are the
/// certificates of the CAs that are trusted now.
///
/// # Errors
///
/// Returns an error if the data can't be used, unless a new CA is asked for.
pub fn plan(
    data: &CaData,
    must_renew: bool,
    published: &str,
    settings: &CaSettings,
    now: Timestamp,
) -> Result<Plan, CaStateError> {
    if !data.contains_key(CERT) && !data.contains_key(KEY) {
        return created(data, published, settings, now, "there was no CA");
    }
    let current = read(data, (CERT, KEY)).and_then(|current| {
        current.check_validity(Path::new(CERT), now)?;
        Ok(current)
    });
    let current = match current {
        Ok(current) => current,
        // The next CA is trusted already.
        Err(CaError::NotValid { until, .. })
            if now >= until && read(data, (NEXT_CERT, NEXT_KEY)).is_ok() =>
        {
            return promote(data, settings, now);
        }
        // The clock of this controller may be behind, so a CA that is not valid yet is not replaced. Otherwise, nothing overlaps
        // without a CA that can be used.
        Err(ref error) if must_renew && !is_not_valid_yet(error, now) => {
            return created(
                data,
                published,
                settings,
                now,
                "the CA could not be used, and was to be renewed",
            );
        }
        Err(error) => return Err(CaStateError::Current(error)),
    };
    if let Some(change) = forget_old(data, now)? {
        return Ok(change);
    }
    let has_next = data.contains_key(NEXT_CERT) || data.contains_key(NEXT_KEY);
    match read(data, (NEXT_CERT, NEXT_KEY)) {
        Ok(next) if has_next => {
            return with_next(data, must_renew, published, (current, next), settings, now);
        }
        Err(error) if has_next && !must_renew => return Err(CaStateError::Next(error)),
        Ok(_) | Err(_) => {}
    }
    let third = current.from.duration_until(current.until) / 3;
    if must_renew || now.duration_until(current.until) < third {
        let next = Authority::new(now, now + settings.ca_life).map_err(CaStateError::Create)?;
        let mut data = data.clone();
        data.insert(NEXT_CERT.to_owned(), next.cert_pem().into_bytes());
        data.insert(NEXT_KEY.to_owned(), next.key_pem().into_bytes());
        data.remove(NEXT_SINCE);
        let why = "the next CA was created";
        return Ok(Plan::Replace {
            data,
            why,
            is_renewal: true,
        });
    }
    used(data, current, None, settings, now)
}

fn is_not_valid_yet(error: &CaError, now: Timestamp) -> bool {
    matches!(error, CaError::NotValid { from, .. } if now < *from)
}

/// Decides what is to be done while there is a next CA.
fn with_next(
    data: &CaData,
    must_renew: bool,
    published: &str,
    (current, next): (Authority, Authority),
    settings: &CaSettings,
    now: Timestamp,
) -> Result<Plan, CaStateError> {
    let is_published = published.contains(certificates_in(&next.cert_pem()).trim());
    let mut changed = data.clone();
    // The overlap begins when the ends can find the CA.
    let why = match time(data, NEXT_SINCE)? {
        None if is_published => {
            changed.insert(NEXT_SINCE.to_owned(), now.to_string().into_bytes());
            "the next CA is published"
        }
        _ if must_renew => "there is a next CA already",
        Some(since) if now.duration_since(since) >= settings.overlap => {
            // The clock of the controller that has made it may be ahead.
            if next.check_validity(Path::new(NEXT_CERT), now).is_ok() {
                return promote(data, settings, now);
            }
            return used(data, current, Some(next), settings, now);
        }
        _ => return used(data, current, Some(next), settings, now),
    };
    Ok(Plan::Replace {
        data: changed,
        why,
        is_renewal: must_renew,
    })
}

/// Puts a new CA in the place of one that is missing or can't be used. CAs that are still trusted remain so, also if somebody has
/// replaced the Secret.
fn created(
    data: &CaData,
    published: &str,
    settings: &CaSettings,
    now: Timestamp,
    why: &'static str,
) -> Result<Plan, CaStateError> {
    let new = Authority::new(now, now + settings.ca_life).map_err(CaStateError::Create)?;
    let mut data = data.clone();
    // Certificates of the CA that could not be used may still be valid, and the next CA may be trusted already.
    let longest = longest_life(&data).ok().flatten().unwrap_or(settings.life);
    let until = now
        .checked_add(longest.max(settings.life))
        .unwrap_or(Timestamp::MAX);
    let mut old = data.remove(OLD_CERTS).unwrap_or_default();
    append(&mut old, data.get(CERT));
    append(&mut old, Some(published));
    let old = cas_in(&String::from_utf8_lossy(&old));
    if !old.is_empty() {
        let until = time(&data, OLD_UNTIL)
            .ok()
            .flatten()
            .map_or(until, |other| other.max(until));
        data.insert(OLD_CERTS.to_owned(), old.into_bytes());
        data.insert(OLD_UNTIL.to_owned(), until.to_string().into_bytes());
    }
    for key in [NEXT_CERT, NEXT_KEY, NEXT_SINCE] {
        data.remove(key);
    }
    data.insert(CERT.to_owned(), new.cert_pem().into_bytes());
    data.insert(KEY.to_owned(), new.key_pem().into_bytes());
    data.insert(LONGEST_LIFE.to_owned(), seconds_of(settings.life));
    Ok(Plan::Replace {
        data,
        why,
        is_renewal: true,
    })
}

/// Returns the plan without the CAs that need not be trusted any more, if there are any.
fn forget_old(data: &CaData, now: Timestamp) -> Result<Option<Plan>, CaStateError> {
    let until = time(data, OLD_UNTIL)?;
    if !data.contains_key(OLD_CERTS) || until.is_some_and(|until| now <= until) {
        return Ok(None);
    }
    let mut data = data.clone();
    data.remove(OLD_CERTS);
    data.remove(OLD_UNTIL);
    let why = "the last certificate of the old CA has expired; it is trusted no more";
    Ok(Some(Plan::Replace {
        data,
        why,
        is_renewal: false,
    }))
}

/// Puts the next CA in the place of the current one, which becomes an old one.
fn promote(data: &CaData, settings: &CaSettings, now: Timestamp) -> Result<Plan, CaStateError> {
    let longest = longest_life(data)?.unwrap_or(settings.life);
    let until = now
        .checked_add(longest.max(settings.life))
        .and_then(|until| until.checked_add(SLACK))
        .unwrap_or(Timestamp::MAX);
    let until = time(data, OLD_UNTIL)?.map_or(until, |other| other.max(until));
    let mut data = data.clone();
    let mut old = data.remove(OLD_CERTS).unwrap_or_default();
    append(&mut old, data.get(CERT));
    for (from, to) in [(NEXT_CERT, CERT), (NEXT_KEY, KEY)] {
        if let Some(value) = data.remove(from) {
            data.insert(to.to_owned(), value);
        }
    }
    data.remove(NEXT_SINCE);
    data.insert(OLD_CERTS.to_owned(), old);
    data.insert(OLD_UNTIL.to_owned(), until.to_string().into_bytes());
    data.insert(LONGEST_LIFE.to_owned(), seconds_of(settings.life));
    let why = "the next CA signs from now on";
    Ok(Plan::Replace {
        data,
        why,
        is_renewal: false,
    })
}

fn used(
    data: &CaData,
    current: Authority,
    next: Option<Authority>,
    settings: &CaSettings,
    now: Timestamp,
) -> Result<Plan, CaStateError> {
    // The old CA is trusted for as long as the last certificate lives, so its life is recorded before it is signed. A CA that
    // somebody else has created may have signed certificates that live as long as it does itself.
    let longest = longest_life(data)?;
    if longest.is_none_or(|longest| longest < settings.life) {
        let of_ca = now.duration_until(current.until);
        let life = longest.map_or_else(|| of_ca.max(settings.life), |_| settings.life);
        let mut data = data.clone();
        data.insert(LONGEST_LIFE.to_owned(), seconds_of(life));
        let why = "certificates get a longer life";
        return Ok(Plan::Replace {
            data,
            why,
            is_renewal: false,
        });
    }
    let mut trust = current.cert_pem().into_bytes();
    append(
        &mut trust,
        next.map(|next| next.cert_pem().into_bytes()).as_ref(),
    );
    // An end uses no file in which a certificate is damaged, or is none of a CA.
    if let Some(old) = data.get(OLD_CERTS) {
        check_cas(Path::new(OLD_CERTS), old).map_err(CaStateError::Old)?;
    }
    append(&mut trust, data.get(OLD_CERTS));
    Ok(Plan::Use {
        authority: Box::new(current),
        trust: certificates_in(&String::from_utf8_lossy(&trust)),
    })
}

/// Returns only the PEM sections that are certificates. Whoever fills in the Secret may put the key next to its certificate.
fn certificates_in(pem: &str) -> String {
    certificate_sections(pem).collect()
}

/// Returns each certificate of a CA once. Others, and those that are damaged, are left out.
fn cas_in(pem: &str) -> String {
    let mut found = BTreeSet::new();
    let is_ca = |section: &String| check_cas(Path::new(OLD_CERTS), section.as_bytes()).is_ok();
    certificate_sections(pem)
        .filter(|section| is_ca(section) && found.insert(section.clone()))
        .collect()
}

fn certificate_sections(pem: &str) -> impl Iterator<Item = String> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let sections = pem.split(BEGIN).skip(1);
    let sections = sections.filter_map(|rest| rest.split_once(END));
    sections.map(|(body, _)| format!("{BEGIN}{}{END}\n", body.replace('\r', "")))
}

/// Appends PEM sections, which begin at the beginning of a line.
fn append(pem: &mut Vec<u8>, more: Option<impl AsRef<[u8]>>) {
    if pem.last().is_some_and(|last| *last != b'\n') {
        pem.push(b'\n');
    }
    if let Some(more) = more {
        pem.extend_from_slice(more.as_ref());
    }
}

fn read(data: &CaData, (cert, key): (&str, &str)) -> Result<Authority, CaError> {
    let value = |key: &str| data.get(key).map_or(&[][..], Vec::as_slice);
    let (cert, key) = ((Path::new(cert), value(cert)), (Path::new(key), value(key)));
    let authority = Authority::parse(cert, key)?;
    check_cas(cert.0, cert.1)?;
    Ok(authority)
}

fn time(data: &CaData, key: &'static str) -> Result<Option<Timestamp>, CaStateError> {
    let expected = "a time, such as 2026-11-30T12:00:00Z";
    value(data, key, expected)
}

fn longest_life(data: &CaData) -> Result<Option<SignedDuration>, CaStateError> {
    let seconds = value(data, LONGEST_LIFE, "a number of seconds")?;
    Ok(seconds.map(SignedDuration::from_secs))
}

fn value<T: std::str::FromStr>(
    data: &CaData,
    key: &'static str,
    expected: &'static str,
) -> Result<Option<T>, CaStateError> {
    let Some(bytes) = data.get(key) else {
        return Ok(None);
    };
    let text = std::str::from_utf8(bytes).ok();
    let parsed = text.and_then(|text| text.trim().parse().ok());
    parsed
        .map(Some)
        .ok_or(CaStateError::Value { key, expected })
}

fn seconds_of(duration: SignedDuration) -> Vec<u8> {
    duration.as_secs().to_string().into_bytes()
}

#[cfg(test)]
mod tests;
