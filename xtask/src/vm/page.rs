//! A table in a page of the documents that is written by a program.

const BEGIN: &str = "<!-- written by cargo xtask vm --update -->\n";
const END: &str = "<!-- end -->\n";

const HEAD: &str = "\
| kernel | tested release | a refused connect | the guard of an uplink | most instructions, with logging | stack, with logging |
|---|---|---|---|---|---|
";

/// The page with these rows in its table; nothing if it has no place for one.
pub(super) fn with(page: &str, rows: &[String]) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
    Some(format!("{before}{BEGIN}{HEAD}{rows}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stands_between_the_marks_is_replaced() {
        let page = format!("before\n{BEGIN}old\n{END}after\n");

        let new = with(&page, &["| 6.1 |".to_owned()]).expect("a page");

        assert_eq!(new, format!("before\n{BEGIN}{HEAD}| 6.1 |\n{END}after\n"));
        assert_eq!(with("no marks", &[]), None);
    }
}
