//! Parses the control data of Debian packages, as `apt-cache show` prints it.

/// Returns a field of the first package in the text.
pub(super) fn field(shown: &str, name: &str) -> Option<String> {
    first(shown).find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key == name).then(|| value.trim().to_owned())
    })
}

/// Returns the names of the dependencies of all packages in the text, with all alternatives.
pub(super) fn dependencies(shown: &str) -> Vec<String> {
    let fields = shown.lines().filter_map(|line| {
        let (key, value) = line.split_once(':')?;
        matches!(key, "Depends" | "Pre-Depends").then_some(value)
    });
    let mut names = Vec::new();
    for name in fields.flat_map(|value| value.split([',', '|'])) {
        // The name is followed by a version in parentheses, or an architecture.
        let name = name.trim().split([' ', '(', ':']).next();
        names.extend(name.filter(|name| !name.is_empty()).map(str::to_owned));
    }
    names
}

fn first(shown: &str) -> impl Iterator<Item = &str> {
    shown.lines().take_while(|line| !line.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: &str = "Package: qemu-system-x86\nVersion: 1:7.2\nPre-Depends: dpkg:any (>= 1)\n\
                         Depends: libaio1 (>= 0.3.93), kmod | module-tools(>= 2)\n\
                         \nPackage: seabios\nVersion: 1.16\nDepends: libc6\n";

    #[test]
    fn a_field_is_that_of_the_first_package() {
        assert_eq!(field(SHOWN, "Version").as_deref(), Some("1:7.2"));
        assert_eq!(field("Package: a\n\nVersion: 1\n", "Version"), None);
    }

    #[test]
    fn dependencies_are_names_without_versions_of_all_packages() {
        let names = dependencies(SHOWN);

        assert_eq!(names, ["dpkg", "libaio1", "kmod", "module-tools", "libc6"]);
    }
}
