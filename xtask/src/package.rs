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
use crate::{setup, statics::Profile, workspace};

/// The name of the image, in a domain that can't be registered (RFC 2606): a node that lacks the image
/// can't pull a foreign one.
pub(crate) const NAME: &str = concat!("culvert.invalid/culvert:", env!("CARGO_PKG_VERSION"));

/// Builds the image and prints its digest.
pub(crate) fn run(profile: Profile, name: String, output: Option<PathBuf>) -> Result<()> {
    setup::ensure(setup::Scope::default())?;
    let folder = workspace::root().join("target/package");
    let output = output.unwrap_or_else(|| folder.join("culvert.tar"));
    fs::create_dir_all(&folder)?;
    let root = tempfile::tempdir_in(&folder)?;
    let program = culvert(profile)?;
    tells_nothing(&program, workspace::root())?;
    put_program(&program, root.path())?;
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
    let build = profile.cargo("build")?;
    if matches!(profile, Profile::Vm) {
        // With the features of its build next to the tests, which run it, too.
        let programs = [workspace::CULVERT, workspace::LAB];
        let [culvert, _] = workspace::build_programs(build, programs)?;
        return Ok(culvert);
    }
    let [culvert] = workspace::build_programs(build, [workspace::CULVERT])?;
    Ok(culvert)
}

/// Fails if a program contains the path of this checkout: two checkouts would build different images.
fn tells_nothing(program: &Path, checkout: &Path) -> Result<()> {
    let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let path = checkout.as_os_str().as_encoded_bytes();
    let is_there = bytes.windows(path.len()).any(|window| window == path);
    let (program, checkout) = (program.display(), checkout.display());
    ensure!(
        !is_there,
        "{program} names the folder {checkout} that it was built in"
    );
    Ok(())
}

/// Copies the program, the image's only file. The runtime provides host names and the resolver's
/// configuration; the API server is verified with the CA of the service account, gateways and agents
/// with their own; and the program needs no user names.
fn put_program(program: &Path, root: &Path) -> Result<()> {
    let place = root.join("culvert");
    fs::copy(program, &place).with_context(|| format!("cannot copy {}", program.display()))?;
    fs::set_permissions(&place, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_names_its_checkout_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("program");
        fs::write(&program, b"\x7fELF culvert/src/main.rs /build/tree/src").expect("a file");

        tells_nothing(&program, Path::new("/build/other")).expect("another folder");
        let error = tells_nothing(&program, Path::new("/build/tree")).expect_err("its folder");

        assert!(error.to_string().contains("/build/tree"), "{error}");
    }
}
