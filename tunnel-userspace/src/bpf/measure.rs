//! What the verifier made of each program, in each variant that can be loaded here. aya loads the
//! maps; the programs are loaded once more beside them, since it keeps no log of a success.

use std::{
    collections::{HashMap, HashSet},
    io,
    net::IpAddr,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
};

use aya::{
    Btf, Ebpf, EbpfError, EbpfLoader,
    maps::{Map, MapData},
    programs::Program,
};
use aya_obj::{Object, generated::bpf_insn};
use serde::Serialize;
use tokio::time::Instant;
use tunnel_common::{
    addr::Address,
    steering::Prefix,
    table::{self, PROGRAMS, Place},
};

use super::{
    load::{self, Globals, Switches},
    logging,
    probe::Features,
    sys,
};

/// The verifier's figures alone, and all that it did.
const BPF_LOG_STATS: u32 = 4;
const BPF_LOG_ALL: u32 = 2;

/// Room for figures, and for the log of a refusal at most.
const ROOM: u32 = 64 << 10;
const ROOM_AT_MOST: u32 = 64 << 20;

/// The mark that the daemon's own sockets have where something is steered.
const OWN_MARK: u32 = 0x0c01_e000;

/// A program, as it was verified.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Measured {
    /// The name of the program.
    pub program: &'static str,
    /// What it was told: `retval` or `rewrite`, by how it refuses, then whether it steers, and
    /// whether it tells its events.
    pub variant: &'static str,
    /// Instructions that the verifier followed, on all paths together; a million at most.
    pub instructions: u64,
    /// Bytes of stack where it is deepest. Before Linux 7.3 the verifier tells only what each
    /// function takes: then the program's own and those of its largest function. Of ours few call
    /// another: those that look for an address of a network namespace, and the one for clients that keep
    /// their backend. The others take next to nothing.
    pub stack: u64,
    /// How long the verifier worked, in microseconds.
    pub microseconds: u64,
    /// How long loading took, in microseconds: the verifier, and compiling.
    pub load_microseconds: u64,
}

/// The programs could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The maps can't be made.
    #[error("cannot make the maps")]
    Maps(#[source] EbpfError),
    /// The object can't be made ready for the kernel.
    #[error("cannot {step} the object")]
    Object {
        /// What was tried.
        step: &'static str,
        /// What was wrong.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The object lacks something.
    #[error("the object has no {name} for its hook, or of its kind")]
    Missing {
        /// The program or map.
        name: String,
    },
    /// The kernel was not asked.
    #[error("cannot load program {program}")]
    Unasked {
        /// The name of the program.
        program: &'static str,
        /// What failed.
        #[source]
        source: io::Error,
    },
    /// The kernel refuses a program.
    #[error(
        "the kernel refuses program {program} ({variant}): {source}; the verifier's log:\n{log}"
    )]
    Refused {
        /// The name of the program.
        program: &'static str,
        /// What it was told.
        variant: &'static str,
        /// What the kernel said.
        source: io::Error,
        /// All that the verifier wrote.
        log: String,
    },
    /// The verifier gave no figures.
    #[error("no figures of program {program} in the verifier's log:\n{log}")]
    NoFigures {
        /// The name of the program.
        program: &'static str,
        /// All that the verifier wrote.
        log: String,
    },
}

/// Loads every program in each variant that the loader may choose on a kernel with these features,
/// and gives the verifier's figures. Nothing is attached or pinned.
///
/// # Errors
///
/// The kernel refuses a program; with the whole log of its verifier.
pub fn measure(features: Features) -> Result<Vec<Measured>, MeasureError> {
    let variants = variants(features);
    let told: Vec<_> = variants.iter().map(Variant::globals).collect();
    let level = logging::number(tracing::Level::TRACE);
    // The kernel's types take long to read: once here, and again only if an object asks for them.
    let mut loader = EbpfLoader::new();
    let mut measured = Vec::new();
    for (bytes, is_logged) in [(load::OBJECT, false), (logging::OBJECT, true)] {
        let object = parse(bytes)?;
        if is_logged {
            loader.override_global(aya_log::LEVEL, &level, true);
        }
        for (variant, globals) in variants.iter().zip(&told) {
            globals.tell(&mut loader);
            let mut maps = loader.load(bytes).map_err(MeasureError::Maps)?;
            let types = types(&mut maps)?;
            let mut patches: HashMap<_, _> = globals.by_name().collect();
            if is_logged {
                patches.insert(aya_log::LEVEL, std::slice::from_ref(&level));
            }
            let object = relocate(object.clone(), &patches, &maps)?;
            for program in PROGRAMS {
                measured.push(verify(
                    &object,
                    program.name,
                    variant.named(is_logged),
                    types.as_fd(),
                )?);
            }
        }
    }
    Ok(measured)
}

/// What the loader may tell the programs.
struct Variant {
    /// Its name, and that of the same with programs that tell their events.
    names: [&'static str; 2],
    features: Features,
    switches: Switches,
}

impl Variant {
    fn globals(&self) -> Globals {
        Globals::of(self.features, &self.switches)
    }

    const fn named(&self, is_logged: bool) -> &'static str {
        let [silent, logged] = self.names;
        if is_logged { logged } else { silent }
    }
}

fn variants(features: Features) -> Vec<Variant> {
    let ranges = [
        (IpAddr::from([198, 19, 0, 0]), 16),
        (IpAddr::from([0xfd00, 0xc01e, 0, 0, 0, 0, 0, 0]), 64),
    ];
    let prefixes = ranges
        .into_iter()
        .filter_map(|(network, length)| Prefix::new(Address::from_ip(network), length));
    let steering = Switches {
        own_mark: OWN_MARK,
        prefixes: prefixes.collect(),
    };
    let none = Switches::default;
    let all = [
        (["rewrite", "rewrite-logged"], false, none()),
        (
            ["rewrite-steering", "rewrite-steering-logged"],
            false,
            steering.clone(),
        ),
        (["retval", "retval-logged"], true, none()),
        (
            ["retval-steering", "retval-steering-logged"],
            true,
            steering,
        ),
    ];
    all.into_iter()
        .filter(|(_, set_retval, _)| features.set_retval || !set_retval)
        .map(|(names, set_retval, switches)| Variant {
            names,
            features: Features {
                set_retval,
                ..features
            },
            switches,
        })
        .collect()
}

fn parse(bytes: &[u8]) -> Result<Object, MeasureError> {
    let mut object = Object::parse(bytes).map_err(failed("parse"))?;
    if object.has_btf_relocations() {
        let kernel = Btf::from_sys_fs().map_err(failed("read the kernel's types for"))?;
        object
            .relocate_btf(&kernel)
            .map_err(failed("relocate the types of"))?;
    }
    Ok(object)
}

/// Makes the object ready for the kernel, with the maps of one that aya loaded: its constants are
/// frozen there, so the verifier leaves out what can't be reached.
fn relocate(
    mut object: Object,
    globals: &HashMap<&str, &[u8]>,
    loaded: &Ebpf,
) -> Result<Object, MeasureError> {
    let globals = globals
        .iter()
        .map(|(name, bytes)| (*name, (&**bytes, true)));
    object
        .patch_map_data(globals.collect())
        .map_err(failed("tell the globals of"))?;
    let maps = std::mem::take(&mut object.maps);
    let maps = maps.iter().map(|(name, map)| {
        let data = loaded.map(name).and_then(data_of);
        let data = data.ok_or_else(|| MeasureError::Missing { name: name.clone() })?;
        Ok((name.as_str(), data.fd().as_fd().as_raw_fd(), map))
    });
    let maps: Vec<_> = maps.collect::<Result<_, MeasureError>>()?;
    let text: HashSet<_> = object
        .functions
        .keys()
        .map(|(section, _)| *section)
        .collect();
    object
        .relocate_maps(maps.into_iter(), &text)
        .map_err(failed("relocate the maps of"))?;
    object
        .relocate_calls(&text)
        .map_err(failed("relocate the calls of"))?;
    Ok(object)
}

/// What the kernel was told of the types in an object: it keeps that with the smallest program.
fn types(loaded: &mut Ebpf) -> Result<OwnedFd, MeasureError> {
    let name = table::SOCK_RELEASE.name;
    let missing = || MeasureError::Missing {
        name: name.to_owned(),
    };
    let Some(Program::CgroupSock(program)) = loaded.program_mut(name) else {
        return Err(missing());
    };
    program.load().map_err(failed("load a program of"))?;
    let info = program.info().map_err(failed("ask for the types of"))?;
    sys::open_btf(info.btf_id().ok_or_else(missing)?).map_err(failed("open the types of"))
}

/// The map behind a kind that the object has.
fn data_of(map: &Map) -> Option<&MapData> {
    match Some(map) {
        Some(
            Map::Array(data)
            | Map::HashMap(data)
            | Map::LruHashMap(data)
            | Map::PerCpuArray(data)
            | Map::SkStorage(data)
            | Map::RingBuf(data),
        ) => Some(data),
        _ => None,
    }
}

fn failed<E>(step: &'static str) -> impl FnOnce(E) -> MeasureError
where
    E: std::error::Error + Send + Sync + 'static,
{
    move |source| MeasureError::Object {
        step,
        source: source.into(),
    }
}

fn verify(
    object: &Object,
    program: &'static str,
    variant: &'static str,
    types: BorrowedFd<'_>,
) -> Result<Measured, MeasureError> {
    let missing = || MeasureError::Missing {
        name: program.to_owned(),
    };
    let found = object.programs.get(program).ok_or_else(missing)?;
    let function = object.functions.get(&found.function_key());
    let function = function.ok_or_else(missing)?;
    let instructions = words(&function.instructions);
    let functions = function.func_info.func_info_bytes();
    let (kind, attach_type) = kind_of(program).ok_or_else(missing)?;
    let raw = sys::Program {
        kind,
        attach_type,
        instructions: &instructions,
        functions: Some(sys::Functions {
            btf: types,
            records: &functions,
        }),
    };
    let unasked = |source| MeasureError::Unasked { program, source };
    let begun = Instant::now();
    let (loaded, log) = sys::load_logged(&raw, BPF_LOG_STATS, ROOM).map_err(unasked)?;
    let took = begun.elapsed();
    if loaded.is_err() {
        return Err(refusal(&raw, program, variant).unwrap_or_else(unasked));
    }
    let Some(figures) = Figures::read(&log) else {
        return Err(MeasureError::NoFigures { program, log });
    };
    Ok(Measured {
        program,
        variant,
        instructions: figures.instructions,
        stack: figures.stack,
        microseconds: figures.microseconds,
        load_microseconds: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
    })
}

/// Why the kernel refuses a program: loaded again, with room for the whole log.
fn refusal(
    raw: &sys::Program<'_>,
    program: &'static str,
    variant: &'static str,
) -> io::Result<MeasureError> {
    let mut room = ROOM;
    // Ten times at most.
    loop {
        let (loaded, log) = sys::load_logged(raw, BPF_LOG_ALL, room)?;
        match loaded {
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && room < ROOM_AT_MOST => {
                room = room.saturating_mul(2);
            }
            Err(source) => {
                return Ok(MeasureError::Refused {
                    program,
                    variant,
                    source,
                    log,
                });
            }
            Ok(_) => return Err(io::Error::other("refused once, and then no more")),
        }
    }
}

/// The type of a program and its hook, as numbers of the kernel.
fn kind_of(program: &str) -> Option<(u32, u32)> {
    let program = table::Program::named(program)?;
    let hook = match program.place {
        Place::Cgroup => program.hook,
        // Told by the link.
        Place::Uplinks => 0,
    };
    Some((program.kind.number(), hook))
}

/// Instructions as they lie in memory: the operation, two registers of four bits, an offset and a
/// number.
fn words(instructions: &[bpf_insn]) -> Vec<u64> {
    let word = |instruction: &bpf_insn| {
        let registers = instruction.dst_reg() | instruction.src_reg() << 4;
        let [offset0, offset1] = instruction.off.to_le_bytes();
        let [number0, number1, number2, number3] = instruction.imm.to_le_bytes();
        u64::from_ne_bytes([
            instruction.code,
            registers,
            offset0,
            offset1,
            number0,
            number1,
            number2,
            number3,
        ])
    };
    instructions.iter().map(word).collect()
}

/// What the verifier says of a success: `print_verification_stats` in kernel/bpf/verifier.c.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Figures {
    instructions: u64,
    stack: u64,
    microseconds: u64,
}

impl Figures {
    fn read(log: &str) -> Option<Self> {
        let rest = |words: &str| log.lines().find_map(|line| line.strip_prefix(words));
        let after = |words: &str| rest(words)?.split_whitespace().next();
        Some(Self {
            instructions: after("processed ")?.parse().ok()?,
            stack: stack(rest("stack depth ")?)?,
            microseconds: after("verification time ")?.parse().ok()?,
        })
    }
}

/// The bytes of the deepest stack: what Linux 7.3 says, or else the program's own and those of its
/// largest function, of numbers that are joined by `+`.
fn stack(depth: &str) -> Option<u64> {
    let mut words = depth.split_whitespace();
    let first = words.next()?;
    if first == "max" {
        return words.next()?.parse().ok();
    }
    let mut parts = first.split('+').map(str::parse::<u64>);
    let own = parts.next()?.ok()?;
    let functions = parts.collect::<Result<Vec<_>, _>>().ok()?;
    Some(own.saturating_add(functions.into_iter().max().unwrap_or(0)))
}

#[cfg(test)]
mod tests;
