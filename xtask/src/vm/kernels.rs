//! The kernels that guests run, one of each line that Culvert supports.

use anyhow::{Context as _, Result, bail, ensure};

use super::control;

/// A line of kernels, and its Debian packages.
#[derive(Debug)]
pub(crate) struct Line {
    /// The name on the command line.
    pub(crate) name: &'static str,
    /// The Debian suite that has it.
    pub(super) suite: &'static str,
    /// The package that depends on the newest kernel of the line.
    pub(super) metapackage: &'static str,
    /// The prefix of each release of the line.
    pub(super) prefix: &'static str,
    /// The packages of a kernel, each followed by the release; the first one has the image.
    pub(super) parts: &'static [&'static str],
    /// The preferred kernel, as long as it is available; a line without one follows its newest kernel.
    pub(super) pinned: Option<Pinned>,
}

/// A kernel pinned by its hash. It has one package.
#[derive(Debug)]
pub(super) struct Pinned {
    pub(super) release: &'static str,
    pub(super) version: &'static str,
    pub(super) sha256: &'static str,
}

/// One kernel of a line.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Choice {
    /// The release, as `uname -r` prints it.
    pub(super) release: String,
    /// The version of its packages.
    pub(super) version: String,
}

const ONE_PACKAGE: &[&str] = &["linux-image-"];
const SPLIT_PACKAGES: &[&str] = &["linux-binary-", "linux-modules-", "linux-base-"];

/// All lines, the oldest first.
pub(crate) static LINES: [Line; 4] = [
    Line {
        name: "5.10",
        suite: "bullseye-security",
        metapackage: "linux-image-cloud-amd64",
        prefix: "5.10.",
        parts: ONE_PACKAGE,
        pinned: Some(Pinned {
            release: "5.10.0-46-cloud-amd64",
            version: "5.10.262-1",
            sha256: "18d94781d1b3052e21967ac2262239e5f14fbf511d6c3e110629d7aa35340760",
        }),
    },
    Line {
        name: "6.1",
        suite: "bookworm-security",
        metapackage: "linux-image-cloud-amd64",
        prefix: "6.1.",
        parts: ONE_PACKAGE,
        pinned: Some(Pinned {
            release: "6.1.0-56-cloud-amd64",
            version: "6.1.192-2",
            sha256: "e7d02b943971edcb8790e256c02cfab3bca6c3d37c1bf25392a57c71300615ee",
        }),
    },
    Line {
        name: "6.12",
        suite: "bookworm-security",
        metapackage: "linux-image-6.12-cloud-amd64",
        prefix: "6.12.",
        parts: ONE_PACKAGE,
        pinned: Some(Pinned {
            release: "6.12.117+deb12-cloud-amd64",
            version: "6.12.117-1~deb12u1",
            sha256: "5195b288dec79e2981d6b84457f38b7ce7310a2d702930ec7d07209c7f78ce37",
        }),
    },
    Line {
        name: "newest",
        suite: "trixie-backports",
        metapackage: "linux-image-cloud-amd64",
        prefix: "",
        parts: SPLIT_PACKAGES,
        pinned: None,
    },
];

impl Line {
    /// Returns true if a failure on this line fails the complete run: a line that follows its newest
    /// kernel needs an inspection first.
    pub(super) const fn is_binding(&self) -> bool {
        self.pinned.is_some()
    }

    /// Returns the packages of a kernel, in apt's notation.
    pub(super) fn packages(&self, choice: &Choice) -> Vec<String> {
        let Choice { release, version } = choice;
        let name = |part| format!("{part}{release}={version}");
        self.parts.iter().map(name).collect()
    }

    /// Returns the name of the folder of an unpacked kernel: the file name of its first package.
    pub(super) fn folder(&self, choice: &Choice) -> String {
        let Choice { release, version } = choice;
        let part = self.parts.first().unwrap_or(&"");
        // The colon of an epoch, as apt writes it.
        let version = version.replace(':', "%3a");
        format!("{part}{release}_{version}_amd64")
    }

    /// Returns the kernel that the line's metapackage depends on, from apt's output.
    pub(super) fn newest(&self, shown: &str) -> Result<Choice> {
        let version = control::field(shown, "Version");
        let version = version.with_context(|| format!("{} has no version", self.metapackage))?;
        let release = control::dependencies(shown)
            .into_iter()
            .find_map(|package| package.strip_prefix("linux-image-").map(str::to_owned))
            .with_context(|| format!("{} depends on no kernel", self.metapackage))?;
        ensure!(
            release.starts_with(self.prefix),
            "{} leads to {release}, which is no kernel of the line {}",
            self.metapackage,
            self.name
        );
        Ok(Choice { release, version })
    }
}

impl Pinned {
    pub(super) fn choice(&self) -> Choice {
        Choice {
            release: self.release.to_owned(),
            version: self.version.to_owned(),
        }
    }
}

/// Returns the lines of these names; without names the pinned ones, or all. `native` is no line.
pub(super) fn chosen(names: &[String], is_whole: bool) -> Result<Vec<&'static Line>> {
    let known = |name: &String| name == super::NATIVE || LINES.iter().any(|it| it.name == *name);
    if let Some(unknown) = names.iter().find(|name| !known(name)) {
        let all: Vec<&str> = LINES.iter().map(|line| line.name).collect();
        bail!(
            "there is no kernel {unknown}: {}, {}",
            all.join(", "),
            super::NATIVE
        );
    }
    let is_chosen = |line: &&Line| {
        if names.is_empty() {
            is_whole || line.is_binding()
        } else {
            names.iter().any(|it| it == line.name)
        }
    };
    Ok(LINES.iter().filter(is_chosen).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str) -> &'static Line {
        LINES.iter().find(|line| line.name == name).expect("a line")
    }

    #[test]
    fn a_pinned_kernel_is_of_its_line_and_has_a_whole_hash_and_one_package() {
        for line in &LINES {
            let Some(pinned) = &line.pinned else { continue };
            assert!(pinned.release.starts_with(line.prefix), "{}", line.name);
            assert_eq!(pinned.sha256.len(), 64, "{}", line.name);
            assert_eq!(line.parts.len(), 1, "{}", line.name);
        }
    }

    #[test]
    fn pinned_lines_are_chosen_by_themselves_and_others_by_name_or_as_the_whole() {
        let by_name = |names: &[&str], is_whole| -> Vec<&str> {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            let lines = chosen(&names, is_whole).expect("known names");
            lines.into_iter().map(|line| line.name).collect()
        };

        assert_eq!(by_name(&[], false), ["5.10", "6.1", "6.12"]);
        assert_eq!(by_name(&[], true), ["5.10", "6.1", "6.12", "newest"]);
        assert_eq!(by_name(&["newest", "native"], false), ["newest"]);
        chosen(&["4.9".to_owned()], true).expect_err("no such line");
    }

    #[test]
    fn the_metapackage_leads_to_the_newest_release() {
        let shown = "Package: linux-image-cloud-amd64\nVersion: 7.3.4-1~bpo13+1\n\
                     Depends: linux-base-cloud-amd64 (= 7.3.4-1~bpo13+1), \
                     linux-image-7.3.4+deb13-cloud-amd64 (= 7.3.4-1~bpo13+1)\n";
        let newest = line("newest");

        let choice = newest.newest(shown).expect("a kernel");

        assert_eq!(choice.release, "7.3.4+deb13-cloud-amd64");
        let package = |part| format!("linux-{part}-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1");
        let packages = ["binary", "modules", "base"].map(package);
        assert_eq!(newest.packages(&choice), packages);
        let folder = "linux-binary-7.3.4+deb13-cloud-amd64_7.3.4-1~bpo13+1_amd64";
        assert_eq!(newest.folder(&choice), folder);
    }

    #[test]
    fn a_metapackage_that_has_moved_to_another_line_is_refused() {
        let shown = "Version: 6.12.1-1\nDepends: linux-image-6.12.1-cloud-amd64 (= 6.12.1-1)\n";

        let error = line("6.1").newest(shown).expect_err("another line");

        assert!(error.to_string().contains("no kernel of the line 6.1"));
    }
}
