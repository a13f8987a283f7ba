//! Measures how the verifier handles each program, in each variant that this kernel can load. aya creates the
//! maps. The programs are then loaded without aya, since it discards the verifier's log after a successful
//! load.

mod program_load;

use std::{
    collections::{HashMap, HashSet},
    io,
    net::IpAddr,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
};

use anyhow::{Context as _, Result, bail};
use aya::{
    Btf, Ebpf, EbpfLoader,
    maps::{Map, MapData},
    programs::Program,
};
use aya_obj::{Object, generated::bpf_insn};
use nix::errno::Errno;
use serde::Serialize;
use tokio::time::Instant;
use tunnel_common::{
    addr::Address,
    steering::Prefix,
    table::{self, AttachPoint, PROGRAMS},
};
use tunnel_userspace::bpf::{
    Features, Globals, LOGGING_OBJECT, OBJECT, PacketSettings, ProgramSettings,
};

/// The verifier's log levels: only statistics, and everything.
const BPF_LOG_STATS: u32 = 4;
const BPF_LOG_ALL: u32 = 2;

/// The size of the log buffer for statistics, and the maximum size of the one for a rejected program.
const LOG_SIZE: u32 = 64 << 10;
const MAX_LOG_SIZE: u32 = 64 << 20;

/// The mark that a daemon sets on its own sockets if its node steers connections.
const OWN_MARK: u32 = 0x0c01_e000;

/// The verifier's statistics for a program.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProgramStats {
    /// The program's name.
    pub program: &'static str,
    /// The variant: `retval` or `rewrite`, depending on how the program refuses a connection, followed by
    /// `-steering` if it steers and redirects packets, and `-logged` if it logs events.
    pub variant: String,
    /// The number of instructions that the verifier processed, over all paths. The limit is a million.
    pub instructions: u64,
    /// The maximum stack depth in bytes. Before Linux 7.3, the verifier reports only each function's stack
    /// size, so this is the sum of the program's own stack size and that of its largest function. Calls are
    /// nested more deeply only in functions that look up a client's address in its network namespace, and
    /// those use almost no stack.
    pub stack: u64,
    /// The time that verification took, in microseconds.
    pub microseconds: u64,
    /// The time that loading took, in microseconds. It includes verification and JIT compilation.
    pub load_microseconds: u64,
}

/// Loads every program in each variant that the loader may choose on a kernel with the given features, and
/// returns the verifier's statistics. Attaches and pins nothing.
pub fn measure(features: Features) -> Result<Vec<ProgramStats>> {
    let variants = variants(features);
    let globals_of_variants: Vec<_> = variants.iter().map(Variant::globals).collect();
    let level = aya_log::Level::Trace.into();
    // Parsing the kernel's BTF is slow, so all variants share one loader. An object with relocations needs
    // the BTF to be parsed again.
    let mut loader = EbpfLoader::new();
    let mut measured = Vec::new();
    for (bytes, is_logged) in [(OBJECT, false), (LOGGING_OBJECT, true)] {
        let object = parse(bytes)?;
        if is_logged {
            loader.override_global(aya_log::LEVEL, &level, true);
        }
        for (variant, globals) in variants.iter().zip(&globals_of_variants) {
            globals.apply_to(&mut loader);
            let mut maps = loader.load(bytes).context("cannot create the maps")?;
            let btf = open_btf_of(&mut maps)?;
            let mut patches: HashMap<_, _> = globals.by_name().collect();
            if is_logged {
                patches.insert(aya_log::LEVEL, std::slice::from_ref(&level));
            }
            let object = relocate(object.clone(), &patches, &maps)?;
            for program in PROGRAMS {
                let name = variant.name(is_logged);
                measured.push(load_and_measure(&object, program, name, btf.as_fd())?);
            }
        }
    }
    Ok(measured)
}

/// A variant of the programs, which depends on the constants that the loader sets in them.
struct Variant {
    features: Features,
    switches: ProgramSettings,
}

impl Variant {
    fn globals(&self) -> Globals {
        Globals::new(self.features, &self.switches)
    }

    fn name(&self, is_logged: bool) -> String {
        let word = |is_so: bool, [so, not]: [&'static str; 2]| if is_so { so } else { not };
        [
            word(self.features.set_retval, ["retval", "rewrite"]),
            word(self.switches.prefixes.is_empty(), ["", "-steering"]),
            word(is_logged, ["-logged", ""]),
        ]
        .concat()
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
    let steering = ProgramSettings {
        own_mark: OWN_MARK,
        prefixes: prefixes.collect(),
        packets: Some(PacketSettings {
            redirect: true,
            ..PacketSettings::default()
        }),
    };
    let mut variants = Vec::new();
    for set_retval in [false, true]
        .into_iter()
        .take(1 + usize::from(features.set_retval))
    {
        for switches in [ProgramSettings::default(), steering.clone()] {
            variants.push(Variant {
                features: Features {
                    set_retval,
                    ..features
                },
                switches,
            });
        }
    }
    variants
}

fn parse(bytes: &[u8]) -> Result<Object> {
    let mut object = Object::parse(bytes)?;
    if object.has_btf_relocations() {
        object.relocate_btf(&Btf::from_sys_fs()?)?;
    }
    Ok(object)
}

/// Prepares an object for loading, with the maps that aya created for it. The constants in these maps are
/// frozen, so the verifier skips code that they make unreachable.
fn relocate(mut object: Object, globals: &HashMap<&str, &[u8]>, loaded: &Ebpf) -> Result<Object> {
    let globals = globals
        .iter()
        .map(|(name, bytes)| (*name, (&**bytes, true)));
    object.patch_map_data(globals.collect())?;
    let maps = std::mem::take(&mut object.maps);
    let maps = maps.iter().map(|(name, map)| {
        let data = loaded.map(name).and_then(data_of);
        let data = data.with_context(|| format!("the object has no map {name} of a known type"))?;
        Ok((name.as_str(), data.fd().as_fd().as_raw_fd(), map))
    });
    let maps: Vec<_> = maps.collect::<Result<_>>()?;
    let text: HashSet<_> = object
        .functions
        .keys()
        .map(|(section, _)| *section)
        .collect();
    object.relocate_maps(maps.into_iter(), &text)?;
    object.relocate_calls(&text)?;
    Ok(object)
}

/// Opens the object's BTF, which aya has loaded into the kernel. Loads the smallest program in order to get
/// the BTF's ID from it.
fn open_btf_of(loaded: &mut Ebpf) -> Result<OwnedFd> {
    let name = table::SOCK_RELEASE.name;
    let Some(Program::CgroupSock(program)) = loaded.program_mut(name) else {
        bail!("the object has no program {name} of type cgroup/sock");
    };
    program.load()?;
    let number = program.info()?.btf_id();
    Ok(program_load::open_btf(
        number.context("the loaded program has no BTF")?,
    )?)
}

/// Returns a map's data, if the map is of a type that the object uses.
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

fn load_and_measure(
    object: &Object,
    program: &'static table::Program,
    variant: String,
    btf: BorrowedFd<'_>,
) -> Result<ProgramStats> {
    let name = program.name;
    let found = object.programs.get(name);
    let function = found.and_then(|found| object.functions.get(&found.function_key()));
    let function = function.with_context(|| format!("the object has no program {name}"))?;
    let raw = program_load::Program {
        kind: program.kind.number(),
        hook: match program.attach_point {
            AttachPoint::Cgroup => program.hook,
            // For these programs, the hook is specified only when the program is attached.
            AttachPoint::Devices => 0,
        },
        instructions: &encode(&function.instructions),
        btf,
        func_info: &function.func_info.func_info_bytes(),
    };
    let begun = Instant::now();
    let (loaded, log) = program_load::load(&raw, BPF_LOG_STATS, LOG_SIZE)?;
    let took = begun.elapsed();
    if loaded.is_err() {
        let (source, log) = refusal(&raw)?;
        bail!(
            "the kernel refuses program {name} ({variant}): {source}; the verifier's log:\n{log}"
        );
    }
    let figures = VerifierStats::parse(&log);
    let figures = figures.with_context(|| {
        format!("the verifier's log of program {name} has no statistics:\n{log}")
    })?;
    Ok(ProgramStats {
        program: name,
        variant,
        instructions: figures.instructions,
        stack: figures.stack,
        microseconds: figures.microseconds,
        load_microseconds: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
    })
}

/// Loads a rejected program once more, and returns the error and the complete log.
fn refusal(raw: &program_load::Program<'_>) -> Result<(io::Error, String)> {
    let mut size = LOG_SIZE;
    // The loop ends, since the buffer size can be doubled at most ten times.
    loop {
        let (loaded, log) = program_load::load(raw, BPF_LOG_ALL, size)?;
        match loaded {
            Err(error)
                if error.raw_os_error() == Some(Errno::ENOSPC as i32) && size < MAX_LOG_SIZE =>
            {
                size = size.saturating_mul(2);
            }
            Err(error) => return Ok((error, log)),
            Ok(_) => bail!("the kernel first refused the program, then accepted it"),
        }
    }
}

/// Encodes instructions in the kernel's format: opcode, two 4-bit registers, offset and immediate.
fn encode(instructions: &[bpf_insn]) -> Vec<u64> {
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

/// The verifier's statistics on a successful load. See `print_verification_stats` in kernel/bpf/verifier.c.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct VerifierStats {
    instructions: u64,
    stack: u64,
    microseconds: u64,
}

impl VerifierStats {
    fn parse(log: &str) -> Option<Self> {
        let rest = |words: &str| log.lines().find_map(|line| line.strip_prefix(words));
        let after = |words: &str| rest(words)?.split_whitespace().next();
        Some(Self {
            instructions: after("processed ")?.parse().ok()?,
            stack: parse_stack_depth(rest("stack depth ")?)?,
            microseconds: after("verification time ")?.parse().ok()?,
        })
    }
}

/// Parses the maximum stack depth. Since Linux 7.3, it is given as `max N`. Older kernels list the stack
/// sizes of the program and its functions, joined by `+`; this returns the first one plus the largest of the
/// others.
fn parse_stack_depth(depth: &str) -> Option<u64> {
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
