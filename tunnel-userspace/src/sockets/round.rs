//! One look at all connected sockets, which ends those that have outlived their backend.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::Path,
    sync::Arc,
    thread,
};

use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;
use tracing::debug;
use tunnel_common::{addr::Protocol, origin::Origin, reason::Reason};

use super::{
    Memory, Remembered, namespaces,
    rule::{Known, Sieve},
};
use crate::{
    failure::chain,
    net::{Diag, DiagError, Place, Stage},
};

const PROC: &str = "/proc";

/// Where sockets are ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reach {
    /// In the network namespace of this process.
    Own,
    /// There, and in that of every other process.
    All,
}

/// What came of a look.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct Round {
    /// Sockets that were ended.
    pub(super) ended: u64,
    /// Sockets in namespaces that were not entered, and that seem to have outlived their backend.
    pub(super) left: usize,
    /// What failed first.
    pub(super) problem: Option<String>,
    /// Whether what failed may succeed a moment later.
    #[serde(rename = "again")]
    pub(super) is_retryable: bool,
}

/// Sockets could not be looked at, or not all of them.
#[derive(Debug, thiserror::Error)]
enum LookError {
    #[error(transparent)]
    Diag(#[from] DiagError),
    #[error("cannot {step}")]
    Step {
        step: &'static str,
        #[source]
        source: io::Error,
    },
}

impl LookError {
    const fn is_retryable(&self) -> bool {
        match self {
            Self::Diag(error) => error.is_retryable(),
            Self::Step { .. } => true,
        }
    }
}

fn cannot(step: &'static str) -> impl FnOnce(io::Error) -> LookError {
    move |source| LookError::Step { step, source }
}

const READ: &str = "read what sockets remember";
const FIND: &str = "find the network namespaces";

/// The sockets of a namespace that may have outlived their backend.
#[derive(Default)]
struct Suspects {
    /// What they remember, by cookie.
    by_cookie: HashMap<u64, Origin>,
    /// Protocols of those without a cookie: the kernel makes one when it is first asked for, as
    /// sock_diag does.
    unnamed: Vec<Protocol>,
}

impl Suspects {
    fn insert(&mut self, socket: &Remembered) {
        if socket.cookie == 0 {
            self.unnamed.push(socket.origin.protocol);
        } else {
            self.by_cookie.insert(socket.cookie, socket.origin);
        }
    }

    fn len(&self) -> usize {
        self.by_cookie.len() + self.unnamed.len()
    }

    /// Whether there are some of a protocol.
    fn has(&self, protocol: Protocol) -> bool {
        let mut named = self.by_cookie.values().map(|origin| origin.protocol);
        self.unnamed.contains(&protocol) || named.any(|its| its == protocol)
    }
}

/// What a look needs everywhere.
struct Look<'a, M> {
    protocols: &'a [Protocol],
    known: Known<'a, M>,
}

/// Looks, and ends what is to be ended, in a thread that blocks for as long as that takes.
pub(super) async fn make<M: Memory + 'static>(
    reach: Reach,
    protocols: Vec<Protocol>,
    memory: Arc<M>,
) -> Round {
    let made = spawn_blocking(move || look(reach, &protocols, &*memory)).await;
    made.unwrap_or_else(|error| Round {
        problem: Some(error.to_string()),
        is_retryable: true,
        ..Round::default()
    })
}

fn look(reach: Reach, protocols: &[Protocol], memory: &impl Memory) -> Round {
    let mut round = Round::default();
    let known = Known::new(memory);
    let look = Look { protocols, known };
    let found = look.suspects().map_err(cannot(READ));
    let own = namespaces::own().map_err(cannot(FIND));
    let (mut suspects, own) = match found.and_then(|suspects| Ok((suspects, own?))) {
        Ok(found) => found,
        Err(error) => {
            round.fail(&error);
            return round;
        }
    };
    let here = suspects.remove(&own);
    if reach == Reach::Own || suspects.is_empty() {
        round.left = suspects.values().map(Suspects::len).sum();
        if let Some(here) = here {
            round.end_all(&look, own, &here);
        }
        return round;
    }
    thread::scope(|scope| {
        // A thread of its own: it never comes back to the namespace it began in.
        let around = thread::Builder::new().name("sockets".into());
        let around = around.spawn_scoped(scope, || look.around(&suspects));
        if let Some(here) = here {
            round.end_all(&look, own, &here);
        }
        match around.map(thread::ScopedJoinHandle::join) {
            Ok(Ok(others)) => round.merge(others),
            Ok(Err(_panic)) => {
                round.fail(&cannot("look into pods")(io::Error::other("it panicked")))
            }
            Err(error) => round.fail(&cannot("start a thread")(error)),
        }
    });
    round
}

impl<M: Memory> Look<'_, M> {
    /// The sockets to be looked at more closely, by the number of their namespace.
    fn suspects(&self) -> io::Result<BTreeMap<u32, Suspects>> {
        let mut sieve = Sieve::new(self.protocols, &self.known);
        let mut suspects = BTreeMap::<u32, Suspects>::new();
        self.known.memory.sockets(&mut |socket| {
            if sieve.holds(&socket)? {
                let there = suspects.entry(socket.namespace).or_default();
                there.insert(&socket);
            }
            Ok(())
        })?;
        Ok(suspects)
    }

    /// Enters the namespaces of suspects, one after the other.
    fn around(&self, suspects: &BTreeMap<u32, Suspects>) -> Round {
        let mut round = Round {
            left: suspects.values().map(Suspects::len).sum(),
            ..Round::default()
        };
        let numbers: BTreeSet<u32> = suspects.keys().copied().collect();
        let found = match namespaces::find(Path::new(PROC), &numbers) {
            Ok(found) => found,
            Err(error) => {
                round.fail(&cannot(FIND)(error));
                return round;
            }
        };
        for (number, namespace) in found {
            let Some(there) = suspects.get(&number) else {
                continue;
            };
            match namespaces::enter(&namespace) {
                Ok(()) => {
                    round.left = round.left.saturating_sub(there.len());
                    round.end_all(self, number, there);
                }
                Err(errno) => round.fail(&cannot("enter a network namespace")(errno.into())),
            }
        }
        round
    }
}

impl Round {
    fn fail(&mut self, error: &LookError) {
        self.is_retryable |= error.is_retryable();
        self.problem.get_or_insert_with(|| chain(error));
    }

    fn merge(&mut self, other: Self) {
        self.ended += other.ended;
        self.left += other.left;
        self.is_retryable |= other.is_retryable;
        self.problem = self.problem.take().or(other.problem);
    }

    /// Ends the suspects of the namespace that the calling thread is in, if they have outlived their
    /// backend.
    fn end_all<M: Memory>(&mut self, look: &Look<'_, M>, namespace: u32, suspects: &Suspects) {
        let mut diag = match Diag::open() {
            Ok(diag) => diag,
            Err(error) => return self.fail(&error.into()),
        };
        for protocol in look.protocols.iter().filter(|its| suspects.has(**its)) {
            let ended = if suspects.unnamed.contains(protocol) {
                self.name_and_end(*protocol, look, namespace, &mut diag)
            } else {
                self.end_some(*protocol, look, suspects, &mut diag)
            };
            // That there is no module for one of them says nothing of the other.
            if let Err(error) = ended {
                self.fail(&error);
            }
        }
    }

    /// Has the kernel make cookies, and looks at what sockets remember once more.
    fn name_and_end<M: Memory>(
        &mut self,
        protocol: Protocol,
        look: &Look<'_, M>,
        namespace: u32,
        diag: &mut Diag,
    ) -> Result<(), LookError> {
        diag.list(protocol, Stage::Connected, |_place| {})?;
        let mut named = look.suspects().map_err(cannot(READ))?;
        named.remove(&namespace).map_or(Ok(()), |suspects| {
            self.end_some(protocol, look, &suspects, diag)
        })
    }

    fn end_some<M: Memory>(
        &mut self,
        protocol: Protocol,
        look: &Look<'_, M>,
        suspects: &Suspects,
        diag: &mut Diag,
    ) -> Result<(), LookError> {
        let mut found = Vec::new();
        diag.list(protocol, Stage::Connected, |place: Place| {
            if let Some(origin) = suspects.by_cookie.get(&place.cookie()) {
                found.push((place, *origin));
            }
        })?;
        for (place, origin) in found {
            // A failure on one of them stops no other.
            match end(&look.known, diag, &place, &origin) {
                Ok(true) => self.ended = self.ended.saturating_add(1),
                Ok(false) => {}
                Err(error) => self.fail(&error),
            }
        }
        Ok(())
    }
}

/// Ends one socket, if it has outlived its backend; whether it was ended.
fn end(
    known: &Known<'_, impl Memory>,
    diag: &mut Diag,
    place: &Place,
    origin: &Origin,
) -> Result<bool, LookError> {
    let has_gone = known.has_gone(place, origin).map_err(cannot(READ))?;
    let protocol = origin.protocol;
    if !has_gone || !diag.end(protocol, place)? {
        return Ok(false);
    }
    let (address, port) = place.peer();
    let (backend, port) = (address.to_ip(), port.to_host());
    let reason = Reason::SocketEnded.label();
    debug!(%backend, port, protocol = protocol.number(), reason, "ended a socket");
    Ok(true)
}
