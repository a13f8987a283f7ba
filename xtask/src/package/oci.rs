//! An archive of one image, as `ctr images import` and other tools load it: an image layout in a tar. It
//! is reproducible: every byte depends only on the input.
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
/// A fixed creation time, so that equal images have equal bytes.
const CREATED: &str = "1970-01-01T00:00:00Z";

/// The metadata of an image.
#[derive(Clone, Debug, Default)]
pub(crate) struct Image {
    /// The names to load it under, each with a tag: `place/name:tag`.
    pub(crate) names: Vec<String>,
    pub(crate) entrypoint: Vec<String>,
    pub(crate) command: Vec<String>,
    /// Variables as `NAME=value`.
    pub(crate) environment: Vec<String>,
}

/// The result of a write.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct Written {
    /// The digest of the manifest, as a container runtime shows it: `sha256:...`.
    pub(crate) digest: String,
    /// The size of the archive, in bytes.
    pub(crate) bytes: u64,
}

impl Image {
    /// Writes the image for linux/amd64 with the files of the folder `root`. The archive is created
    /// atomically.
    pub(crate) fn write(&self, root: &Path, output: &Path) -> Result<Written> {
        let tags: Vec<&str> = self.names.iter().map(|it| tag(it)).collect::<Result<_>>()?;
        ensure!(!tags.is_empty(), "an image needs a name");
        let folder = match output.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let layer = Layer::pack(root, folder)?;
        let config = self.config(&layer).to_string();
        let manifest = manifest(&config, &layer).to_string();
        let index = self.index(&manifest, &tags).to_string();
        let part = beside(output);
        let written = archive(&part, layer, [&config, &manifest], &index)
            .and_then(|()| Ok(fs::rename(&part, output)?));
        if written.is_err() {
            // The first error is the one to return.
            drop(fs::remove_file(&part));
        }
        written.with_context(|| format!("cannot write {}", output.display()))?;
        Ok(Written {
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

    /// Builds the index: an entry for each name, all of the same image.
    fn index(&self, manifest: &str, tags: &[&str]) -> Value {
        let lines = self.names.iter().zip(tags).map(|(name, tag)| {
            let mut line = descriptor(MANIFEST, manifest);
            line["platform"] = json!({ "architecture": "amd64", "os": "linux" });
            line["annotations"] = json!({
                "io.containerd.image.name": name,
                "org.opencontainers.image.ref.name": tag,
            });
            line
        });
        json!({ "schemaVersion": 2, "manifests": lines.collect::<Vec<_>>() })
    }
}

/// Returns the tag of a name. A colon before the last slash belongs to a port.
fn tag(name: &str) -> Result<&str> {
    let (_, last) = name.rsplit_once('/').unwrap_or(("", name));
    let parts = last.split_once(':');
    let parts = parts.filter(|(name, tag)| !name.is_empty() && !tag.is_empty());
    let (_, tag) = parts.with_context(|| format!("{name:?} is no name:tag of an image"))?;
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

fn beside(output: &Path) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

fn archive(output: &Path, layer: Layer, texts: [&str; 2], index: &str) -> Result<()> {
    let mut tar = Builder::new(io::BufWriter::new(File::create(output)?));
    for folder in ["blobs", "blobs/sha256"] {
        let mut header = header(0o755, 0);
        header.set_entry_type(EntryType::Directory);
        tar.append_data(&mut header, folder, io::empty())?;
    }
    for text in texts {
        let digest = layer::digest(text.as_bytes());
        file(&mut tar, &blob(&digest), text.len() as u64, text.as_bytes())?;
    }
    file(&mut tar, &blob(&layer.digest), layer.length, layer.file)?;
    file(&mut tar, "index.json", index.len() as u64, index.as_bytes())?;
    let layout = json!({ "imageLayoutVersion": "1.0.0" }).to_string();
    file(
        &mut tar,
        "oci-layout",
        layout.len() as u64,
        layout.as_bytes(),
    )?;
    Ok(tar.into_inner()?.into_inner()?.sync_all()?)
}

fn blob(digest: &str) -> String {
    format!("blobs/sha256/{digest}")
}

fn file<W: Write>(tar: &mut Builder<W>, path: &str, size: u64, data: impl Read) -> io::Result<()> {
    tar.append_data(&mut header(0o644, size), path, data)
}

#[cfg(test)]
mod tests;
