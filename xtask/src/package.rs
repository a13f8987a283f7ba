//! `cargo xtask package`: the container image, made without Docker.

mod layer;
pub(crate) mod oci;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use self::oci::Image;
use crate::{setup, statics::Profile, workspace};

/// The name of the image, in a domain that is a placeholder.
pub(crate) const NAME: &str = concat!("culvert.dev/culvert:", env!("CARGO_PKG_VERSION"));

/// Builds the image and says what it is.
pub(crate) fn run(profile: Profile, name: String, output: Option<PathBuf>) -> Result<()> {
    setup::ensure(setup::Scope::default())?;
    let folder = workspace::root().join("target/package");
    let output = output.unwrap_or_else(|| folder.join("culvert.tar"));
    fs::create_dir_all(&folder)?;
    let root = tempfile::tempdir_in(&folder)?;
    put_program(&culvert(profile)?, root.path())?;
    let image = Image {
        names: vec![name],
        entrypoint: vec!["/culvert".to_owned()],
        ..Image::default()
    };
    let written = image.write(root.path(), &output)?;
    println!("image:   {}", image.names.join(", "));
    println!("archive: {}", output.display());
    println!("digest:  {}", written.digest);
    println!("size:    {} bytes", written.bytes);
    Ok(())
}

fn culvert(profile: Profile) -> Result<PathBuf> {
    let mut command = profile.build()?;
    command.args(["--package", "tunnel-userspace", "--bin", "culvert"]);
    let mut built = workspace::built(&mut command)?;
    let program = built.remove("culvert");
    program.context("cargo build did not name the program culvert")
}

/// All that the image has. The runtime gives a container its host names and its resolver's
/// configuration; a cluster's API server is known by the authority that comes with a service
/// account, gateways and agents by their own; and what runs needs no name of a user.
fn put_program(program: &Path, root: &Path) -> Result<()> {
    let place = root.join("culvert");
    fs::copy(program, &place).with_context(|| format!("cannot copy {}", program.display()))?;
    fs::set_permissions(&place, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
