//! The kernels on which `cargo xtask vm` runs tests.

use anyhow::{Context as _, Result, bail, ensure};

use super::debian_control;

/// A series of kernel releases, such as 6.1, with its Debian packages.
#[derive(Debug)]
pub(crate) struct Series {
    /// Name of the series on the command line.
    pub(crate) name: &'static str,
    /// Debian suite that contains the packages.
    pub(super) suite: &'static str,
    /// Package that depends on the newest kernel in the series.
    pub(super) metapackage: &'static str,
    /// Prefix of every release in the series.
    pub(super) release_prefix: &'static str,
    /// Names of a kernel's packages, without the release at the end. The first package contains the boot
    /// image.
    pub(super) package_prefixes: &'static [&'static str],
    /// The kernel to use if it is available. A series without a pinned kernel uses its newest one.
    pub(super) pinned: Option<PinnedKernel>,
    /// The modules whose netns tests run on every change, without their submodules: those whose results this kernel is
    /// the likeliest to change; `packet` stands for the packet tests. With the series' name on the command line, all tests run.
    pub(super) modules: &'static [&'static str],
}

/// A kernel in a single package with a known hash.
#[derive(Debug)]
pub(super) struct PinnedKernel {
    /// Release, as `uname -r` prints it.
    pub(super) release: &'static str,
    /// Version of the kernel's package.
    pub(super) package: &'static str,
    /// SHA-256 of the kernel's package, in hexadecimal.
    pub(super) sha256: &'static str,
}

/// A kernel's version.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct KernelVersion {
    /// Release, as `uname -r` prints it.
    pub(super) release: String,
    /// Version of the kernel's Debian packages.
    pub(super) package: String,
}

const ONE_PACKAGE: &[&str] = &["linux-image-"];
const SPLIT_PACKAGES: &[&str] = &["linux-binary-", "linux-modules-", "linux-base-"];

/// All series, oldest first.
pub(crate) static ALL_SERIES: [Series; 4] = [
    Series {
        name: "5.10",
        suite: "bullseye-security",
        metapackage: "linux-image-cloud-amd64",
        release_prefix: "5.10.",
        package_prefixes: ONE_PACKAGE,
        pinned: Some(PinnedKernel {
            release: "5.10.0-46-cloud-amd64",
            package: "5.10.262-1",
            sha256: "18d94781d1b3052e21967ac2262239e5f14fbf511d6c3e110629d7aa35340760",
        }),
        // The oldest kernel: errors are set by rewriting, filters are attached in place of links, maps and links are
        // pinned without newer features.
        modules: &[
            "features",
            "guard",
            "hooks",
            "map_layouts",
            "map_sizes",
            "masquerade",
            "packet",
            "packets",
            "packets::fragments",
            "packets::link_kinds",
            "packets::links",
            "packets::reachability",
            "race",
            "refusals_by_rewrite",
            "restart",
            "service_addresses",
            "tunnel::steering",
            "udp_flows",
            "unconnected_udp",
        ],
    },
    Series {
        name: "6.1",
        suite: "bookworm-security",
        metapackage: "linux-image-cloud-amd64",
        release_prefix: "6.1.",
        package_prefixes: ONE_PACKAGE,
        pinned: Some(PinnedKernel {
            release: "6.1.0-56-cloud-amd64",
            package: "6.1.192-2",
            sha256: "e7d02b943971edcb8790e256c02cfab3bca6c3d37c1bf25392a57c71300615ee",
        }),
        // It sets errors as 6.12 does, and attaches filters as 5.10 does.
        modules: &[
            "features",
            "hooks",
            "packets",
            "refusals_by_retval",
            "restart",
        ],
    },
    Series {
        name: "6.12",
        suite: "bookworm-security",
        metapackage: "linux-image-6.12-cloud-amd64",
        release_prefix: "6.12.",
        package_prefixes: ONE_PACKAGE,
        pinned: Some(PinnedKernel {
            release: "6.12.117+deb12-cloud-amd64",
            package: "6.12.117-1~deb12u1",
            sha256: "5195b288dec79e2981d6b84457f38b7ce7310a2d702930ec7d07209c7f78ce37",
        }),
        // The machine that runs all tests natively often has a kernel like this one, but lacks its modules.
        modules: &[
            "features",
            "guard",
            "hooks",
            "packets",
            "packets::links",
            "packets::nfs",
            "packets::order",
            "packets::sctp",
            "refusals_by_retval",
            "restart",
            "socket_helper",
            "socket_termination",
        ],
    },
    Series {
        name: "newest",
        suite: "trixie-backports",
        metapackage: "linux-image-cloud-amd64",
        release_prefix: "",
        package_prefixes: SPLIT_PACKAGES,
        pinned: None,
        modules: &[],
    },
];

impl Series {
    /// Returns true if a failure on this series makes the complete run fail. A series without a pinned kernel
    /// may fail for reasons other than a change to Culvert.
    pub(super) const fn is_required(&self) -> bool {
        self.pinned.is_some()
    }

    /// Returns a kernel's packages, each as `name=version`.
    pub(super) fn packages(&self, version: &KernelVersion) -> Vec<String> {
        let KernelVersion { release, package } = version;
        let name = |prefix| format!("{prefix}{release}={package}");
        self.package_prefixes.iter().map(name).collect()
    }

    /// Returns the name of the directory into which a kernel is unpacked: the file name of its first package.
    pub(super) fn directory(&self, version: &KernelVersion) -> String {
        let KernelVersion { release, package } = version;
        let prefix = self.package_prefixes.first().unwrap_or(&"");
        // apt escapes the colon of an epoch in file names.
        let package = package.replace(':', "%3a");
        format!("{prefix}{release}_{package}_amd64")
    }

    /// Returns the kernel that the metapackage depends on, parsed from the output of `apt-cache show`.
    pub(super) fn newest(&self, shown: &str) -> Result<KernelVersion> {
        let package = debian_control::field(shown, "Version");
        let package =
            package.with_context(|| format!("the package {} has no version", self.metapackage))?;
        let release = debian_control::dependencies(shown)
            .into_iter()
            .find_map(|package| package.strip_prefix("linux-image-").map(str::to_owned))
            .with_context(|| format!("the package {} depends on no kernel", self.metapackage))?;
        ensure!(
            release.starts_with(self.release_prefix),
            "the package {} depends on the kernel {release}, which is not of the series {}",
            self.metapackage,
            self.name
        );
        Ok(KernelVersion { release, package })
    }
}

impl PinnedKernel {
    pub(super) fn version(&self) -> KernelVersion {
        KernelVersion {
            release: self.release.to_owned(),
            package: self.package.to_owned(),
        }
    }
}

/// Returns the series with the given names. Without names, returns all series if `all` is true, and otherwise
/// only those with pinned kernels. The name `native` is ignored.
pub(super) fn select(names: &[String], all: bool) -> Result<Vec<&'static Series>> {
    let is_known = |name: &String| {
        name == super::NATIVE || ALL_SERIES.iter().any(|series| series.name == *name)
    };
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        let known: Vec<&str> = ALL_SERIES.iter().map(|series| series.name).collect();
        bail!(
            "there is no kernel {unknown}; choose one of {}, {}",
            known.join(", "),
            super::NATIVE
        );
    }
    let is_selected = |series: &&Series| {
        if names.is_empty() {
            all || series.is_required()
        } else {
            names.iter().any(|name| name == series.name)
        }
    };
    Ok(ALL_SERIES.iter().filter(is_selected).collect())
}

/// Returns the modules whose netns tests run on a kernel for every change.
pub(super) fn modules(series: &str) -> &'static [&'static str] {
    let found = ALL_SERIES.iter().find(|it| it.name == series);
    found.map_or(&[], |found| found.modules)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str) -> &'static Series {
        let mut all = ALL_SERIES.iter();
        all.find(|series| series.name == name).expect("a series")
    }

    #[test]
    fn a_pinned_kernel_is_of_its_series_and_has_a_complete_hash_and_one_package() {
        for series in &ALL_SERIES {
            let name = series.name;
            let Some(pinned) = &series.pinned else {
                continue;
            };
            assert!(pinned.release.starts_with(series.release_prefix), "{name}");
            assert_eq!(pinned.sha256.len(), 64, "{name}");
            assert_eq!(series.package_prefixes.len(), 1, "{name}");
        }
    }

    #[test]
    fn pinned_series_are_selected_by_default_and_others_by_name_or_with_all() {
        let selected = |names: &[&str], all| -> Vec<&str> {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            let series = select(&names, all).expect("known names");
            series.into_iter().map(|series| series.name).collect()
        };

        assert_eq!(selected(&[], false), ["5.10", "6.1", "6.12"]);
        assert_eq!(selected(&[], true), ["5.10", "6.1", "6.12", "newest"]);
        assert_eq!(selected(&["newest", "native"], false), ["newest"]);
        select(&["4.9".to_owned()], true).expect_err("no such series");
    }

    #[test]
    fn the_newest_release_is_a_dependency_of_the_metapackage() {
        let shown = "Package: linux-image-cloud-amd64\nVersion: 7.3.4-1~bpo13+1\n\
                     Depends: linux-base-cloud-amd64 (= 7.3.4-1~bpo13+1), \
                     linux-image-7.3.4+deb13-cloud-amd64 (= 7.3.4-1~bpo13+1)\n";
        let newest = series("newest");

        let version = newest.newest(shown).expect("a kernel");

        assert_eq!(version.release, "7.3.4+deb13-cloud-amd64");
        let package = |part| format!("linux-{part}-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1");
        let packages = ["binary", "modules", "base"].map(package);
        assert_eq!(newest.packages(&version), packages);
        let directory = "linux-binary-7.3.4+deb13-cloud-amd64_7.3.4-1~bpo13+1_amd64";
        assert_eq!(newest.directory(&version), directory);
    }

    #[test]
    fn a_metapackage_that_has_moved_to_another_series_is_refused() {
        let shown = "Version: 6.12.1-1\nDepends: linux-image-6.12.1-cloud-amd64 (= 6.12.1-1)\n";

        let error = series("6.1").newest(shown).expect_err("another series");

        assert!(error.to_string().contains("not of the series 6.1"));
    }
}
