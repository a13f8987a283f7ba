//! Writes an image's archive: an OCI image layout in a tar file, which `ctr images import` and other tools
//! can load. It is reproducible: the same files and metadata result in the same bytes.
//!
//! <https://github.com/opencontainers/image-spec/blob/v1.1.1/image-layout.md>

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tar::{Builder, EntryType};

use super::layer::{self, Layer, header};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Creation time of every image, which is fixed so that equal images have equal bytes.
const CREATED: &str = "1970-01-01T00:00:00Z";

/// An image's metadata.
#[derive(Clone, Debug, Default)]
pub(crate) struct Image {
    /// Names with tags: `registry/name:tag`.
    pub(crate) names: Vec<String>,
    pub(crate) entrypoint: Vec<String>,
    pub(crate) command: Vec<String>,
    /// Environment variables as `NAME=value`.
    pub(crate) environment: Vec<String>,
}

/// The digest and size of a written image.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct WrittenImage {
    /// Digest of the manifest, as container runtimes print it: `sha256:...`.
    pub(crate) digest: String,
    /// Size of the archive in bytes.
    pub(crate) bytes: u64,
}

impl Image {
    /// Writes the archive of an image for linux/amd64 that contains the files in the directory `root`. The
    /// file `output` appears only once it is complete.
    pub(crate) fn write(&self, root: &Path, output: &Path) -> Result<WrittenImage> {
        let tags: Vec<&str> = self.names.iter().map(|it| tag(it)).collect::<Result<_>>()?;
        ensure!(!tags.is_empty(), "an image needs a name");
        let directory = match output.parent() {
            Some(directory) if directory != Path::new("") => directory,
            _ => Path::new("."),
        };
        let layer = Layer::pack(root, directory)?;
        let config = self.config(&layer).to_string();
        let manifest = manifest(&config, &layer).to_string();
        let index = self.index(&manifest, &tags).to_string();
        let partial = partial_path(output);
        let result = write_archive(&partial, layer, [&config, &manifest], &index)
            .and_then(|()| Ok(fs::rename(&partial, output)?));
        if result.is_err() {
            // Return the first error rather than one from the removal.
            drop(fs::remove_file(&partial));
        }
        result.with_context(|| format!("cannot write {}", output.display()))?;
        Ok(WrittenImage {
            digest: format!("sha256:{}", layer::digest(manifest.as_bytes())),
            bytes: fs::metadata(output)?.len(),
        })
    }

    fn config(&self, layer: &Layer) -> Value {
        json!({
            "architecture": "amd64",
            "os": "linux",
            "created": CREATED,
            "config": {
                "Entrypoint": self.entrypoint,
                "Cmd": self.command,
                "Env": self.environment,
                "WorkingDir": "/",
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", layer.digest)] },
            "history": [{ "created": CREATED, "created_by": "cargo xtask package" }],
        })
    }

    /// Returns the index, which has one entry per name; all entries refer to the same image.
    fn index(&self, manifest: &str, tags: &[&str]) -> Value {
        let entries = self.names.iter().zip(tags).map(|(name, tag)| {
            let mut entry = descriptor(MANIFEST, manifest);
            entry["platform"] = json!({ "architecture": "amd64", "os": "linux" });
            entry["annotations"] = json!({
                "io.containerd.image.name": name,
                "org.opencontainers.image.ref.name": tag,
            });
            entry
        });
        json!({ "schemaVersion": 2, "manifests": entries.collect::<Vec<_>>() })
    }
}

/// Returns the tag in an image name. A colon before the last slash starts a port, not a tag.
fn tag(name: &str) -> Result<&str> {
    let (_, last) = name.rsplit_once('/').unwrap_or(("", name));
    let parts = last.split_once(':');
    let parts = parts.filter(|(name, tag)| !name.is_empty() && !tag.is_empty());
    let (_, tag) =
        parts.with_context(|| format!("the image name {name:?} is not of the form name:tag"))?;
    Ok(tag)
}

fn descriptor(kind: &str, content: &str) -> Value {
    json!({
        "mediaType": kind,
        "digest": format!("sha256:{}", layer::digest(content.as_bytes())),
        "size": content.len(),
    })
}

fn manifest(config: &str, layer: &Layer) -> Value {
    json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": descriptor(CONFIG, config),
        "layers": [{
            "mediaType": LAYER,
            "digest": format!("sha256:{}", layer.digest),
            "size": layer.length,
        }],
    })
}

/// Returns the path to which the archive is written before it is renamed.
fn partial_path(output: &Path) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

fn write_archive(output: &Path, layer: Layer, texts: [&str; 2], index: &str) -> Result<()> {
    let mut tar = Builder::new(io::BufWriter::new(File::create(output)?));
    for directory in ["blobs", "blobs/sha256"] {
        let mut header = header(0o755, 0);
        header.set_entry_type(EntryType::Directory);
        tar.append_data(&mut header, directory, io::empty())?;
    }
    for text in texts {
        let digest = layer::digest(text.as_bytes());
        add_text(&mut tar, &blob_path(&digest), text)?;
    }
    let path = blob_path(&layer.digest);
    add_file(&mut tar, &path, layer.length, layer.file)?;
    add_text(&mut tar, "index.json", index)?;
    let layout = json!({ "imageLayoutVersion": "1.0.0" }).to_string();
    add_text(&mut tar, "oci-layout", &layout)?;
    Ok(tar.into_inner()?.into_inner()?.sync_all()?)
}

fn blob_path(digest: &str) -> String {
    format!("blobs/sha256/{digest}")
}

fn add_text<W: Write>(tar: &mut Builder<W>, path: &str, text: &str) -> io::Result<()> {
    add_file(tar, path, text.len() as u64, text.as_bytes())
}

fn add_file<W: Write>(
    tar: &mut Builder<W>,
    path: &str,
    size: u64,
    data: impl Read,
) -> io::Result<()> {
    tar.append_data(&mut header(0o644, size), path, data)
}

#[cfg(test)]
mod tests;
