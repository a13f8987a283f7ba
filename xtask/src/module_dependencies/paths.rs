//! Finds the paths in a source file, both in `use` declarations and in code.

use std::collections::BTreeSet;

use super::tokens::{Token, tokens};

/// An absolute path, which begins at the root of its own crate (`crate::model::Node`) or of another one
/// (`aya::Pod`).
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct FoundPath {
    pub(super) path: String,
    pub(super) line: usize,
    /// True if the path is in a `use` declaration.
    pub(super) is_use: bool,
}

/// Returns all paths in a module's source, except those in `#[cfg(test)]` items.
pub(super) fn find_paths(source: &str, module: &[String]) -> Vec<FoundPath> {
    let mut parser = Parser {
        tokens: tokens(source),
        position: 0,
        module: module.to_vec(),
        inline_modules: Vec::new(),
        depth: 0,
        local_names: BTreeSet::new(),
        paths: Vec::new(),
    };
    parser.run();
    let mut found: Vec<FoundPath> = parser
        .paths
        .iter()
        .filter_map(|path| path.resolve(&parser.local_names))
        .collect();
    found.sort();
    found.dedup();
    found
}

/// A path as it is written in the source, and the module that contains it.
#[derive(Debug)]
struct WrittenPath {
    segments: Vec<String>,
    module: Vec<String>,
    line: usize,
    is_use: bool,
}

#[derive(Debug)]
struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    /// Index of the current token.
    position: usize,
    /// Path of the current module.
    module: Vec<String>,
    /// Brace depth just outside each open inline module.
    inline_modules: Vec<usize>,
    /// Number of open braces.
    depth: usize,
    /// Names that a `use` or `mod` in this file declares. A path that begins with such a name is not
    /// reported, since its declaration is.
    local_names: BTreeSet<String>,
    paths: Vec<WrittenPath>,
}

impl<'a> Parser<'a> {
    fn run(&mut self) {
        while let Some(token) = self.tokens.get(self.position).copied() {
            if self.is_ahead(&["#", "[", "cfg", "(", "test", ")", "]"]) {
                self.position += 7;
                self.skip_item();
                continue;
            }
            match token.text {
                "mod" => self.open_module(),
                "use" if self.text(1) != "<" => {
                    self.position += 1;
                    self.use_tree(&[]);
                }
                "{" => {
                    self.depth += 1;
                    self.position += 1;
                }
                "}" => self.close(),
                _ if token.is_name() && self.starts_path() => self.path_in_code(token.line),
                _ => self.position += 1,
            }
        }
    }

    /// Returns the text of the token that is `ahead` tokens after the current one, or an empty string at the
    /// end.
    fn text(&self, ahead: usize) -> &'a str {
        self.tokens
            .get(self.position + ahead)
            .map_or("", |token| token.text)
    }

    /// Returns true if the next tokens, beginning with the current one, have the given texts.
    fn is_ahead(&self, texts: &[&str]) -> bool {
        texts
            .iter()
            .enumerate()
            .all(|(ahead, text)| self.text(ahead) == *text)
    }

    /// Skips an item, up to a semicolon or the brace that closes its body.
    fn skip_item(&mut self) {
        let mut depth = 0_usize;
        while self.position < self.tokens.len() {
            let text = self.text(0);
            self.position += 1;
            match text {
                "{" => depth += 1,
                "}" if depth <= 1 => return,
                "}" => depth -= 1,
                ";" if depth == 0 => return,
                _ => {}
            }
        }
    }

    /// Handles a `mod` item.
    fn open_module(&mut self) {
        let name = self.text(1).to_owned();
        match self.text(2) {
            "{" => {
                self.local_names.insert(name.clone());
                self.module.push(name);
                self.inline_modules.push(self.depth);
                self.depth += 1;
                self.position += 3;
            }
            ";" => {
                self.local_names.insert(name);
                self.position += 3;
            }
            _ => self.position += 1,
        }
    }

    /// Handles a closing brace.
    fn close(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        if self.inline_modules.last() == Some(&self.depth) {
            self.inline_modules.pop();
            self.module.pop();
        }
        self.position += 1;
    }

    /// Returns true if the current name is the first segment of a path that has at least two.
    fn starts_path(&self) -> bool {
        let before = |back: usize| {
            self.position
                .checked_sub(back)
                .and_then(|index| self.tokens.get(index))
                .map_or("", |token| token.text)
        };
        let is_continued = before(1) == "."
            || (before(1) == "::"
                && (before(2) == ">" || before(2).starts_with(char::is_alphabetic)));
        !is_continued && self.text(1) == "::"
    }

    /// Reads a path outside any `use` declaration.
    fn path_in_code(&mut self, line: usize) {
        let mut segments = vec![self.text(0).to_owned()];
        self.position += 1;
        let is_name = |token: &Token<'_>| token.is_name();
        while self.text(0) == "::" && self.tokens.get(self.position + 1).is_some_and(is_name) {
            segments.push(self.text(1).to_owned());
            self.position += 2;
        }
        self.paths.push(WrittenPath {
            segments,
            module: self.module.clone(),
            line,
            is_use: false,
        });
    }

    /// Reads a tree in a `use` declaration; all paths in it begin with `prefix`.
    fn use_tree(&mut self, prefix: &[String]) {
        let mut segments = prefix.to_vec();
        let line = self.tokens.get(self.position).map_or(0, |token| token.line);
        loop {
            match self.text(0) {
                "::" => self.position += 1,
                "{" => return self.use_group(&segments),
                "*" => {
                    self.position += 1;
                    break;
                }
                "self" if !segments.is_empty() => {
                    self.position += 1;
                    break;
                }
                name if name.starts_with(|c: char| c == '_' || c.is_alphabetic()) => {
                    segments.push(name.to_owned());
                    self.position += 1;
                    if self.text(0) != "::" {
                        break;
                    }
                }
                _ => {
                    self.position += 1;
                    return;
                }
            }
        }
        let mut name = segments.last().cloned().unwrap_or_default();
        if self.text(0) == "as" {
            self.text(1).clone_into(&mut name);
            self.position += 2;
        }
        self.local_names.insert(name);
        self.paths.push(WrittenPath {
            segments,
            module: self.module.clone(),
            line,
            is_use: true,
        });
    }

    /// Reads a group in braces in a `use` declaration.
    fn use_group(&mut self, prefix: &[String]) {
        self.position += 1;
        while self.position < self.tokens.len() && self.text(0) != "}" {
            if self.text(0) == "," {
                self.position += 1;
            } else {
                self.use_tree(prefix);
            }
        }
        self.position += 1;
    }
}

impl WrittenPath {
    /// Returns the absolute path, or `None` if the path begins with a type or with a name from this file.
    fn resolve(&self, local_names: &BTreeSet<String>) -> Option<FoundPath> {
        let first = self.segments.first()?.as_str();
        let supers = self
            .segments
            .iter()
            .take_while(|segment| *segment == "super")
            .count();
        let absolute: Vec<&str> = match first {
            "crate" | "tunnel_userspace" => {
                self.segments.iter().skip(1).map(String::as_str).collect()
            }
            "self" | "super" => {
                let kept = self.module.len().checked_sub(supers)?;
                let own = self.module.iter().take(kept);
                let skipped = if supers > 0 { supers } else { 1 };
                own.chain(self.segments.iter().skip(skipped))
                    .map(String::as_str)
                    .collect()
            }
            _ if first.starts_with(char::is_uppercase) => return None,
            _ if !self.is_use && local_names.contains(first) => return None,
            _ => return Some(self.with_absolute(self.segments.join("::"))),
        };
        Some(self.with_absolute(format!("crate::{}", absolute.join("::"))))
    }

    const fn with_absolute(&self, path: String) -> FoundPath {
        FoundPath {
            path,
            line: self.line,
            is_use: self.is_use,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_in_use_declarations_and_in_code_are_found_and_made_absolute() {
        let module = ["plan", "endpoints"].map(str::to_owned);
        for (claim, source, wanted) in [
            (
                "each path of a use tree",
                "pub(crate) use crate::{a::{self, b as c}, d::*};\nuse ::aya::Pod;",
                "aya::Pod crate::a crate::a::b crate::d",
            ),
            (
                "super and self",
                "use super::front::id;\nmod inner { use super::super::other; }\nself::z::run();",
                "crate::plan::endpoints::z::run crate::plan::front::id crate::plan::other",
            ),
            (
                "paths in code, but no methods",
                "fn f(x: k8s_openapi::Api) { tokio::select! {} x.y::<u8>(); Vec::<u8>::new(); }",
                "k8s_openapi::Api tokio::select",
            ),
            (
                "names of the file, only where they are declared",
                "mod kube;\nuse crate::bpf;\nfn f() { kube::watch(); bpf::load(); }",
                "crate::bpf",
            ),
            (
                "no item that only tests compile",
                "#[cfg(test)]\nmod tests { use aya::Pod; fn f() { { } } }\n#[cfg(test)]\nuse \
                 kube::Client;\nuse tokio::net;",
                "tokio::net",
            ),
        ] {
            let found = find_paths(source, &module);
            let found: Vec<_> = found.iter().map(|found| &*found.path).collect();
            assert_eq!(found.join(" "), wanted, "{claim}");
        }
    }

    #[test]
    fn a_path_has_the_number_of_its_line() {
        let found = find_paths("\nuse a::{\n  b,\n  c,\n};", &[]);

        let lines: Vec<_> = found.iter().map(|found| found.line).collect();
        assert_eq!(lines, [3, 4]);
    }
}
