//! `cargo xtask package`: builds the container image, without Docker.

mod layer;
pub(crate) mod oci;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use self::oci::Image;
use crate::{
    setup,
    static_build::Profile,
    workspace,
    workspace_binaries::{self, CULVERT, LAB},
};

/// Default name of the image. Its domain cannot be registered (RFC 2606), so a node that lacks the image
/// never pulls one from elsewhere.
pub(crate) const NAME: &str = concat!("culvert.invalid/culvert:", env!("CARGO_PKG_VERSION"));

/// Builds the image and prints its digest.
pub(crate) fn run(profile: Profile, name: String, output: Option<PathBuf>) -> Result<()> {
    setup::ensure(setup::Scope::default())?;
    let directory = workspace::root().join("target/package");
    let output = output.unwrap_or_else(|| directory.join("culvert.tar"));
    fs::create_dir_all(&directory)?;
    let root = tempfile::tempdir_in(&directory)?;
    let program = build_culvert(profile)?;
    ensure_reproducible(&program, workspace::root())?;
    copy_program(&program, root.path())?;
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

fn build_culvert(profile: Profile) -> Result<PathBuf> {
    let build = profile.cargo("build")?;
    if matches!(profile, Profile::Vm) {
        // Use the same command as the tests do, so that Cargo selects the same features and recompiles
        // nothing.
        let [culvert, _] = workspace_binaries::build(build, [CULVERT, LAB])?;
        return Ok(culvert);
    }
    let [culvert] = workspace_binaries::build(build, [CULVERT])?;
    Ok(culvert)
}

/// Fails if a program contains this checkout's path, since another checkout would then build a different
/// image.
fn ensure_reproducible(program: &Path, checkout: &Path) -> Result<()> {
    let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let path = checkout.as_os_str().as_encoded_bytes();
    let contains_path = bytes.windows(path.len()).any(|window| window == path);
    let (program, checkout) = (program.display(), checkout.display());
    ensure!(
        !contains_path,
        "the program {program} contains the path {checkout} of the directory that it was built in"
    );
    Ok(())
}

/// Copies the program, which is the only file in the image. The container runtime mounts the hosts file and
/// the resolver's configuration. No CA bundle is needed: the API server is verified with the service
/// account's CA, gateways and agents with the tunnel's CA. No user names are needed either.
fn copy_program(program: &Path, root: &Path) -> Result<()> {
    let path = root.join("culvert");
    fs::copy(program, &path).with_context(|| format!("cannot copy {}", program.display()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_contains_the_path_of_its_checkout_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let program = directory.path().join("program");
        fs::write(&program, b"\x7fELF culvert/src/main.rs /build/tree/src").expect("a file");

        ensure_reproducible(&program, Path::new("/build/other")).expect("another directory");
        let error = ensure_reproducible(&program, Path::new("/build/tree")).expect_err("its path");

        assert!(error.to_string().contains("/build/tree"), "{error}");
    }
}
