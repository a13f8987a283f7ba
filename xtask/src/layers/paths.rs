//! The paths in a file: in its `use` lines, and inline.

use std::collections::BTreeSet;

use super::tokens::{Token, tokens};

/// A path, either from the root of its crate (`crate::model::Node`) or beginning with the name of
/// another crate (`aya::Pod`).
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Named {
    pub(super) path: String,
    pub(super) line: usize,
    pub(super) is_use: bool,
}

/// Returns all paths of a file that is the module `module`. Code only for tests is skipped.
pub(super) fn named(source: &str, module: &[String]) -> Vec<Named> {
    let mut walk = Walk {
        tokens: tokens(source),
        at: 0,
        module: module.to_vec(),
        inline: Vec::new(),
        depth: 0,
        local: BTreeSet::new(),
        raw: Vec::new(),
    };
    walk.run();
    let mut found: Vec<Named> = walk
        .raw
        .iter()
        .filter_map(|raw| raw.resolve(&walk.local))
        .collect();
    found.sort();
    found.dedup();
    found
}

/// A path as written, with the module that contains it.
#[derive(Debug)]
struct Raw {
    segments: Vec<String>,
    module: Vec<String>,
    line: usize,
    is_use: bool,
}

#[derive(Debug)]
struct Walk<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
    module: Vec<String>,
    /// The depth of braces at which each inline module opened.
    inline: Vec<usize>,
    depth: usize,
    /// Names from a `use` or `mod` of this file; those lines are checked themselves.
    local: BTreeSet<String>,
    raw: Vec<Raw>,
}

impl<'a> Walk<'a> {
    fn run(&mut self) {
        while let Some(token) = self.tokens.get(self.at).copied() {
            if self.is_ahead(&["#", "[", "cfg", "(", "test", ")", "]"]) {
                self.at += 7;
                self.skip_item();
                continue;
            }
            match token.text {
                "mod" => self.open_module(),
                "use" if self.text(1) != "<" => {
                    self.at += 1;
                    self.tree(&[]);
                }
                "{" => {
                    self.depth += 1;
                    self.at += 1;
                }
                "}" => self.close(),
                _ if token.is_name() && self.starts_path() => self.inline_path(token.line),
                _ => self.at += 1,
            }
        }
    }

    fn text(&self, ahead: usize) -> &'a str {
        self.tokens
            .get(self.at + ahead)
            .map_or("", |token| token.text)
    }

    fn is_ahead(&self, texts: &[&str]) -> bool {
        texts
            .iter()
            .enumerate()
            .all(|(ahead, text)| self.text(ahead) == *text)
    }

    /// Skips to the end of the item: a semicolon, or the brace that closes its body.
    fn skip_item(&mut self) {
        let mut depth = 0_usize;
        while self.at < self.tokens.len() {
            let text = self.text(0);
            self.at += 1;
            match text {
                "{" => depth += 1,
                "}" if depth <= 1 => return,
                "}" => depth -= 1,
                ";" if depth == 0 => return,
                _ => {}
            }
        }
    }

    fn open_module(&mut self) {
        let name = self.text(1).to_owned();
        match self.text(2) {
            "{" => {
                self.local.insert(name.clone());
                self.module.push(name);
                self.inline.push(self.depth);
                self.depth += 1;
                self.at += 3;
            }
            ";" => {
                self.local.insert(name);
                self.at += 3;
            }
            _ => self.at += 1,
        }
    }

    fn close(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        if self.inline.last() == Some(&self.depth) {
            self.inline.pop();
            self.module.pop();
        }
        self.at += 1;
    }

    /// Returns true if the current name begins a path of at least two segments.
    fn starts_path(&self) -> bool {
        let before = |back: usize| {
            self.at
                .checked_sub(back)
                .and_then(|at| self.tokens.get(at))
                .map_or("", |t| t.text)
        };
        let goes_on = before(1) == "."
            || (before(1) == "::"
                && (before(2) == ">" || before(2).starts_with(char::is_alphabetic)));
        !goes_on && self.text(1) == "::"
    }

    fn inline_path(&mut self, line: usize) {
        let mut segments = vec![self.text(0).to_owned()];
        self.at += 1;
        while self.text(0) == "::" && self.tokens.get(self.at + 1).is_some_and(Token::is_name) {
            segments.push(self.text(1).to_owned());
            self.at += 2;
        }
        self.raw.push(Raw {
            segments,
            module: self.module.clone(),
            line,
            is_use: false,
        });
    }

    /// Reads the tree of a `use`, from the current token to the one after it.
    fn tree(&mut self, prefix: &[String]) {
        let mut segments = prefix.to_vec();
        let line = self.tokens.get(self.at).map_or(0, |token| token.line);
        loop {
            match self.text(0) {
                "::" => self.at += 1,
                "{" => return self.branches(&segments),
                "*" => {
                    self.at += 1;
                    break;
                }
                "self" if !segments.is_empty() => {
                    self.at += 1;
                    break;
                }
                name if name.starts_with(|c: char| c == '_' || c.is_alphabetic()) => {
                    segments.push(name.to_owned());
                    self.at += 1;
                    if self.text(0) != "::" {
                        break;
                    }
                }
                _ => {
                    self.at += 1;
                    return;
                }
            }
        }
        let mut name = segments.last().cloned().unwrap_or_default();
        if self.text(0) == "as" {
            self.text(1).clone_into(&mut name);
            self.at += 2;
        }
        self.local.insert(name);
        self.raw.push(Raw {
            segments,
            module: self.module.clone(),
            line,
            is_use: true,
        });
    }

    fn branches(&mut self, prefix: &[String]) {
        self.at += 1;
        while self.at < self.tokens.len() && self.text(0) != "}" {
            if self.text(0) == "," {
                self.at += 1;
            } else {
                self.tree(prefix);
            }
        }
        self.at += 1;
    }
}

impl Raw {
    fn resolve(&self, local: &BTreeSet<String>) -> Option<Named> {
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
            // A type, or a name defined in this file.
            _ if first.starts_with(char::is_uppercase) => return None,
            _ if !self.is_use && local.contains(first) => return None,
            _ => return Some(self.name(self.segments.join("::"))),
        };
        Some(self.name(format!("crate::{}", absolute.join("::"))))
    }

    const fn name(&self, path: String) -> Named {
        Named {
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
    fn paths_are_read_from_uses_and_from_code_and_seen_from_the_root() {
        let module = ["plan", "endpoints"].map(str::to_owned);
        for (claim, source, wanted) in [
            (
                "a tree of uses, to its leaves",
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
                "names of the file, where they come in only",
                "mod kube;\nuse crate::bpf;\nfn f() { kube::watch(); bpf::load(); }",
                "crate::bpf",
            ),
            (
                "nothing that only tests see",
                "#[cfg(test)]\nmod tests { use aya::Pod; fn f() { { } } }\n#[cfg(test)]\nuse \
                 kube::Client;\nuse tokio::net;",
                "tokio::net",
            ),
        ] {
            let found = named(source, &module);
            let found: Vec<_> = found.iter().map(|named| &*named.path).collect();
            assert_eq!(found.join(" "), wanted, "{claim}");
        }
    }

    #[test]
    fn a_path_knows_its_line() {
        let found = named("\nuse a::{\n  b,\n  c,\n};", &[]);

        let lines: Vec<_> = found.iter().map(|named| named.line).collect();
        assert_eq!(lines, [3, 4]);
    }
}
