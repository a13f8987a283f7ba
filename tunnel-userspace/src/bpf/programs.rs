//! An object's loaded programs, shared by the modules that attach them.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aya::{
    Ebpf,
    maps::Map,
    programs::{Program, ProgramError, ProgramFd, SchedClassifier, TestRun as _, TestRunOptions},
};
use tunnel_common::table::{self, ProgramType};

use super::data_path::LoadError;

/// The maximum number of bytes by which a program makes a frame longer: an IPv6 header, and the header of an ICMP error.
const MAX_GROWTH: usize = 48;

/// The result of a program that the kernel has run on a frame.
#[derive(Clone, Debug)]
pub struct FrameRun {
    /// The verdict: -1 to pass, 2 to drop, 7 to send back by the link it came by.
    pub verdict: i32,
    /// The frame afterwards.
    pub frame: Vec<u8>,
    /// The time for which the program ran.
    pub took: Duration,
}

/// An object's programs.
#[derive(Clone)]
pub(super) struct Programs(Arc<Mutex<Ebpf>>);

impl Programs {
    pub(super) fn new(ebpf: Ebpf) -> Self {
        Self(Arc::new(Mutex::new(ebpf)))
    }

    /// Loads programs into the kernel, unless they have been loaded.
    pub(super) fn load(&self, rows: &[table::Program]) -> Result<(), LoadError> {
        let mut ebpf = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for row in rows {
            let is_loaded = ebpf.program(row.name).is_some_and(|it| it.fd().is_ok());
            if !is_loaded {
                load(&mut ebpf, row)?;
            }
        }
        Ok(())
    }

    /// Returns a file descriptor for a program.
    pub(super) fn fd(&self, row: &table::Program) -> io::Result<ProgramFd> {
        let ebpf = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let program = ebpf.program(row.name).ok_or_else(|| missing_program(row))?;
        program.fd().map_err(to_io_error)?.try_clone()
    }

    /// Calls `work` with a tc program.
    pub(super) fn with_classifier<T>(
        &self,
        row: &table::Program,
        work: impl FnOnce(&mut SchedClassifier) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut ebpf = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match ebpf.program_mut(row.name) {
            Some(Program::SchedClassifier(program)) => work(program),
            _ => Err(missing_program(row)),
        }
    }

    /// Runs a tc program on a frame.
    pub(super) fn run(&self, row: &table::Program, frame: &[u8]) -> io::Result<FrameRun> {
        let mut changed = vec![0; frame.len() + MAX_GROWTH];
        let options = TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut changed),
            ..TestRunOptions::default()
        };
        let result = self.with_classifier(row, |program| {
            program.test_run(options).map_err(to_io_error)
        })?;
        changed.truncate(usize::try_from(result.data_size_out).map_err(io::Error::other)?);
        Ok(FrameRun {
            verdict: result.return_value.cast_signed(),
            frame: changed,
            took: result.duration,
        })
    }

    /// Calls `work` with a map of the object, if there is one with this name.
    pub(super) fn with_map<T>(&self, name: &str, work: impl FnOnce(&Map) -> T) -> Option<T> {
        let ebpf = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ebpf.map(name).map(work)
    }
}

fn missing_program(row: &table::Program) -> io::Error {
    io::Error::other(format!(
        "the compiled object has no program {} of the expected type",
        row.name
    ))
}

/// Converts a program error to an I/O error. If a system call failed, keeps the kernel's error.
pub(super) fn to_io_error(error: ProgramError) -> io::Error {
    if let ProgramError::SyscallError(error) = error {
        error.io_error
    } else {
        io::Error::other(error)
    }
}

/// Loads a program from an object into the kernel.
pub(super) fn load(ebpf: &mut Ebpf, row: &table::Program) -> Result<(), LoadError> {
    let loaded = match (row.kind, ebpf.program_mut(row.name)) {
        (ProgramType::SocketAddress, Some(Program::CgroupSockAddr(program))) => program.load(),
        (ProgramType::Socket, Some(Program::CgroupSock(program))) => program.load(),
        (ProgramType::Classifier, Some(Program::SchedClassifier(program))) => program.load(),
        _ => return Err(LoadError::NoProgram { program: row.name }),
    };
    loaded.map_err(|source| LoadError::Program {
        program: row.name,
        source,
    })
}
