//! Determines from apt's sources which Debian mirrors this machine uses.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

/// Directory that contains apt's configuration.
const DIRECTORY: &str = "/etc/apt";
/// Keyring that contains the keys for all Debian suites.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A mirror of a Debian archive.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Mirror {
    pub(super) uri: String,
    /// Paths of the keyrings that verify its package lists.
    pub(super) keyrings: Vec<String>,
}

/// The mirrors of Debian's two archives.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Mirrors {
    pub(super) main: Mirror,
    pub(super) security: Mirror,
    /// This machine's suite, such as `bookworm`.
    pub(super) codename: String,
}

/// An entry in a sources file.
#[derive(Debug, Default, Eq, PartialEq)]
struct Entry {
    uri: String,
    suites: Vec<String>,
    components: Vec<String>,
    keyrings: Vec<String>,
}

impl Mirrors {
    /// Reads this machine's apt sources.
    pub(super) fn read() -> Result<Self> {
        let release =
            fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
        let codename = codename(&release)
            .context("/etc/os-release has no VERSION_CODENAME: this machine must run Debian")?;
        let mut entries = Vec::new();
        for path in source_files(Path::new(DIRECTORY))? {
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            if path.extension().is_some_and(|kind| kind == "sources") {
                entries.extend(parse_deb822(&text));
            } else {
                entries.extend(text.lines().filter_map(parse_line));
            }
        }
        Self::choose(&entries, codename)
    }

    /// Returns the mirror that has the given suite.
    pub(super) fn of(&self, suite: &str) -> &Mirror {
        if suite.ends_with("-security") {
            &self.security
        } else {
            &self.main
        }
    }

    /// Selects Debian's entries. Other vendors' entries may have a suite with the same name.
    fn choose(entries: &[Entry], codename: &str) -> Result<Self> {
        let main = best_match(entries, codename, "/debian")
            .context("the sources of apt have no mirror of Debian")?;
        let suite = format!("{codename}-security");
        let security = best_match(entries, &suite, "/debian-security").or_else(|| {
            // There is no entry for security updates, but mirrors have both archives in adjacent directories.
            let uri = main.uri.strip_suffix("/debian")?;
            Some(Mirror {
                uri: format!("{uri}/debian-security"),
                ..main.clone()
            })
        });
        Ok(Self {
            main,
            security: security.context("the sources of apt have no mirror of Debian security")?,
            codename: codename.to_owned(),
        })
    }
}

impl Mirror {
    /// Returns a line for the given suite, in the format of a sources file. It also names [`KEYRING`], since
    /// an entry's own keyrings may lack the keys for other suites.
    pub(super) fn line(&self, suite: &str) -> String {
        let mut keyrings = self.keyrings.clone();
        let use_keyring = Path::new(KEYRING).is_file() || keyrings.is_empty();
        if use_keyring && !keyrings.iter().any(|keyring| keyring == KEYRING) {
            keyrings.push(KEYRING.to_owned());
        }
        format!(
            "deb [arch=amd64 signed-by={}] {} {suite} main\n",
            keyrings.join(","),
            self.uri
        )
    }
}

/// Returns the first entry that matches both the suite and the end of the URI, or else the first one that
/// matches either of them.
fn best_match(entries: &[Entry], suite: &str, uri_end: &str) -> Option<Mirror> {
    let rank = |entry: &Entry| {
        let has_suite = entry.suites.iter().any(|name| name == suite);
        u8::from(has_suite) + u8::from(entry.uri.ends_with(uri_end))
    };
    let mut found: Option<(u8, &Entry)> = None;
    for entry in entries {
        let has_main = entry.components.iter().any(|name| name == "main");
        let rank = rank(entry);
        if has_main && rank > found.map_or(0, |(best, _)| best) {
            found = Some((rank, entry));
        }
    }
    found.map(|(_, entry)| Mirror {
        uri: entry.uri.clone(),
        keyrings: entry.keyrings.clone(),
    })
}

fn codename(release: &str) -> Option<&str> {
    let line = |line: &'_ str| line.starts_with("VERSION_CODENAME=");
    let (_, name) = release.lines().find(|text| line(text))?.split_once('=')?;
    Some(name.trim_matches('"')).filter(|name| !name.is_empty())
}

/// Returns apt's sources files, in the order in which apt reads them.
fn source_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let parts = directory.join("sources.list.d");
    let mut files = match fs::read_dir(&parts) {
        Ok(entries) => entries
            .map(|entry| Ok(entry?.path()))
            .collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", parts.display()));
        }
    };
    files.retain(|path| {
        let kind = path.extension().unwrap_or_default();
        kind == "list" || kind == "sources"
    });
    files.sort();
    let list = directory.join("sources.list");
    if list.is_file() {
        files.insert(0, list);
    }
    Ok(files)
}

/// Parses a line of the form `deb [options] uri suite component...`.
fn parse_line(line: &str) -> Option<Entry> {
    let line = line.split('#').next()?.trim();
    let line = line.strip_prefix("deb")?;
    let mut rest = line.strip_prefix([' ', '\t'])?.trim_start();
    let mut options = "";
    if let Some(bracket) = rest.strip_prefix('[') {
        (options, rest) = bracket.split_once(']')?;
    }
    let mut words = rest.split_whitespace();
    let uri = words.next()?;
    let suite = words.next()?;
    let keyrings = options
        .split_whitespace()
        .find_map(|option| option.strip_prefix("signed-by="));
    Some(Entry {
        uri: without_slash(uri),
        suites: vec![suite.to_owned()],
        components: words.map(str::to_owned).collect(),
        keyrings: keyring_paths(keyrings.unwrap_or_default()),
    })
}

/// Parses a sources file in deb822 format.
fn parse_deb822(text: &str) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut fields: Vec<(String, String)> = Vec::new();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    for line in lines.chain([""]) {
        if line.trim().is_empty() {
            entries.extend(entry(&fields));
            fields.clear();
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push(' ');
                value.push_str(line.trim());
            }
        } else if let Some((key, value)) = line.split_once(':') {
            fields.push((key.trim().to_lowercase(), value.trim().to_owned()));
        }
    }
    entries
}

/// Returns the entry in a deb822 stanza, or `None` if it is disabled or has only source packages.
fn entry(fields: &[(String, String)]) -> Option<Entry> {
    let value = |name: &str| {
        let field = fields.iter().find(|(key, _)| key == name);
        field.map_or("", |(_, value)| value)
    };
    let words = |name: &str| value(name).split_whitespace().collect::<Vec<_>>();
    let is_disabled = words("enabled")
        .first()
        .is_some_and(|value| ["no", "false", "without", "off", "disable", "0"].contains(value));
    if is_disabled || !words("types").contains(&"deb") {
        return None;
    }
    let owned = |words: Vec<&str>| words.into_iter().map(str::to_owned).collect();
    Some(Entry {
        uri: without_slash(words("uris").first()?),
        suites: owned(words("suites")),
        components: owned(words("components")),
        keyrings: keyring_paths(value("signed-by")),
    })
}

/// Returns the paths in a `Signed-By` value, which may also contain a key or a fingerprint.
fn keyring_paths(value: &str) -> Vec<String> {
    let values = value.split([',', ' ']);
    values
        .filter(|value| value.starts_with('/'))
        .map(str::to_owned)
        .collect()
}

fn without_slash(uri: &str) -> String {
    uri.trim_end_matches('/').to_owned()
}

#[cfg(test)]
mod tests;
