//! Parses Debian packages' control data in the output of `apt-cache show`.

/// Returns a field's value for the first package in the text.
pub(super) fn field(shown: &str, name: &str) -> Option<String> {
    let mut first_package = shown.lines().take_while(|line| !line.trim().is_empty());
    first_package.find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key == name).then(|| value.trim().to_owned())
    })
}

/// Returns the names of all dependencies of the packages in the text, including alternatives.
pub(super) fn dependencies(shown: &str) -> Vec<String> {
    let fields = shown.lines().filter_map(|line| {
        let (key, value) = line.split_once(':')?;
        matches!(key, "Depends" | "Pre-Depends").then_some(value)
    });
    let mut names = Vec::new();
    for name in fields.flat_map(|value| value.split([',', '|'])) {
        // The name may be followed by a version in parentheses or by an architecture.
        let name = name.trim().split([' ', '(', ':']).next();
        names.extend(name.filter(|name| !name.is_empty()).map(str::to_owned));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: &str = "Package: qemu-system-x86\nVersion: 1:7.2\nPre-Depends: dpkg:any (>= 1)\n\
                         Depends: libaio1 (>= 0.3.93), kmod | module-tools(>= 2)\n\
                         \nPackage: seabios\nVersion: 1.16\nDepends: libc6\n";

    #[test]
    fn a_field_is_read_from_the_first_package() {
        assert_eq!(field(SHOWN, "Version").as_deref(), Some("1:7.2"));
        assert_eq!(field("Package: a\n\nVersion: 1\n", "Version"), None);
    }

    #[test]
    fn the_dependencies_of_all_packages_are_names_without_versions() {
        let names = dependencies(SHOWN);

        assert_eq!(names, ["dpkg", "libaio1", "kmod", "module-tools", "libc6"]);
    }
}
