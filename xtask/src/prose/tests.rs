use super::*;

/// The words found in a file, as `line word`.
fn found(name: &str, text: &str) -> Vec<String> {
    let places = of_file(&Finder::new(), name, text);
    places.into_iter().map(|place| format!("{} {}", place.line, WORDS[place.word].name)).collect()
}

fn figures_of(rooms: &[(&str, usize)]) -> BTreeMap<String, usize> {
    rooms.iter().map(|(room, count)| ((*room).to_owned(), *count)).collect()
}

#[test]
fn rust_comments_and_messages_are_read_and_code_is_not() {
    let text = "\
//! Whether it came.
use said::told; // so many
/// What `whoever` said_host and Come::say() are,
/// put
/// in: what nobody(x) hears.
fn behind<'a, T>(came: &'a T) where T: Say { came.went(\"behind\", 'x'); }
fn f() {
    // How this is done.
    panic!(\"{came} of the {}, which \\\"nobody\\\" \\
            told\");
}
/* Nothing
 * is under way. */
";
    let expected = [
        "1 Whether ...",
        "1 come",
        "2 so many",
        "3 What ...",
        "4 put in",
        "5 hear",
        "9 nobody",
        "10 tell",
        "13 under way",
    ];
    assert_eq!(found("a.rs", text), expected);
}

#[test]
fn docstrings_comments_and_messages_of_python_are_read() {
    let text = "\
\"\"\"What a module is.

>>> came = put_in(\"who said that it came\")
\"\"\"
said = {\"behind\": 1}  # so long
#: How it goes on.
told = [\"where nobody\", f'it is {came[\"told\"]} for \\'whoever\\''
        ' asks', 'who',
        r\"the most\"]
class A:
    '''The same.'''
PROGRAM = '''
import behind
say = came
'''
";
    let expected = ["1 What ...", "5 so long", "6 go on", "7 whoever", "11 The same ..."];
    assert_eq!(found("a.py", text), expected);
    assert_eq!(found("a.py", "f(\"the peer is under \"  # why\n  \"way, they say\")"), ["1 under way", "2 say"]);
}

#[test]
fn kernels_are_read_and_comments_at_the_margin_are_their_docs() {
    let text =
        "// What a rank\n// says.\nu32 came;\nstruct A {\n    // What it is.\n    u32 behind;  // beside it\n};\n";
    assert_eq!(found("a.cuh", text), ["1 What ...", "2 say", "6 beside"]);
}

#[test]
fn pages_are_read_without_code_generated_tables_and_targets() {
    let text = "\
# What came

    whoever

- an item

    nobody, see [the guide](beside.md), <b title=\"behind\">told</b>

```
said
```

`so
many` so many

<!-- table of told.json -->
| nobody |
<!-- end -->
<!-- say -->
It goes on.
";
    assert_eq!(found("a.md", text), ["1 come", "7 nobody", "7 tell", "14 so many", "20 go on"]);
    assert_eq!(found("a.txt", text), [""; 0]);
}

#[test]
fn other_meanings_are_permitted() {
    let permitted = "There is no slot. It is no longer up. It comes from the peer and comes up. The most recent one, the most \
                     specific. It tells two lanes apart. A lane left behind a firewall falls behind. A put into a region; \
                     the PUT in flight, put in place. The memory of the peer's region, the one lane. A lane goes on the \
                     wire; it went down. Memory of ours-only. An output in a log.";
    assert_eq!(found("a.md", permitted), [""; 0]);
    let counted = "It is no slot. It comes in. The most rows. It tells two lanes. It is behind a lane. It put into it. \
                   A lane of the peer's. The one that is. It goes on until it went. One of ours. Put it in.";
    let expected = [
        "is no X",
        "come",
        "the most",
        "tell",
        "behind",
        "put in",
        "of the peer's",
        "the one",
        "go on",
        "went",
        "of ours",
        "put in",
    ];
    assert_eq!(found("a.md", counted), expected.map(|name| format!("1 {name}")));
}

#[test]
fn a_clause_or_paragraph_ends_a_phrase() {
    assert_eq!(found("a.md", "What is put, in\nall, the\n\nmost; (so) many"), [""; 0]);
}

#[test]
fn every_first_word_is_plain() {
    for word in WORDS {
        assert!(!word.instead.is_empty(), "{} names no standard term", word.name);
    }
    let finder = Finder::new();
    assert!(finder.firsts().all(|first| first.chars().all(|letter| letter.is_ascii_lowercase() || letter == '-')));
}

#[test]
fn a_room_above_its_figure_fails_and_one_below_does_not() {
    let allowed = figures_of(&[("engine", 2), ("old", 0), ("proto", 2)]);
    let problems = judge(&figures_of(&[("engine", 3), ("new", 0), ("proto", 1)]), &allowed);
    assert_eq!(problems.len(), 3);
    assert!(problems[0].starts_with("engine: 3 words and openings that a standard term replaces, at most 2 are"));
    assert!(problems[0].contains("cargo xtask prose engine"));
    assert!(problems[1].starts_with("new: no figure in [prose]"));
    assert!(problems[2].starts_with("old: has no files"));
}

#[test]
fn figures_are_only_lowered() {
    let allowed = figures_of(&[("engine", 2), ("old", 0), ("proto", 2)]);
    let counts = figures_of(&[("engine", 3), ("new", 4), ("proto", 1)]);
    assert_eq!(lowered(&counts, &allowed), figures_of(&[("engine", 2), ("new", 4), ("proto", 1)]));
}

#[test]
fn recording_replaces_the_table_and_keeps_the_others() {
    let figures = figures_of(&[("cuda-ipc", 3), ("engine", 2)]);
    let budgets = "circles = []\n\n[lines]\nengine = 7\n";
    let recorded = replaced(budgets, &figures);
    assert!(recorded.starts_with(budgets) && recorded.ends_with("[prose]\ncuda-ipc = 3\nengine = 2\n"));
    assert_eq!(super::figures(&recorded.parse().unwrap()), figures);
    let lower = figures_of(&[("engine", 1)]);
    assert_eq!(replaced(&recorded, &lower), replaced(budgets, &lower));
}

#[test]
fn every_file_has_a_room() {
    let paths =
        ["crates/engine/src/a.rs", "python/crossrail/a.py", "tests/python/a.py", "docs/guides/a.md", "README.md"];
    assert_eq!(paths.map(room), ["engine", "crossrail", "tests", "docs", "root"]);
}

#[test]
fn places_are_listed_by_room() {
    let folder = std::env::temp_dir().join(format!("crossrail-prose-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("docs")).unwrap();
    std::fs::write(folder.join("docs/a.md"), "# A\n\nIt came.\n").unwrap();
    std::fs::write(folder.join("docs/b.md"), "<!-- Written by b. Do not edit. -->\nIt came.\n").unwrap();
    let (docs, other) = (places(&folder, "docs"), places(&folder, "engine"));
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(docs.unwrap(), "docs/a.md:3: It came.  [come: receive, arrive, follow, return]\n");
    assert_eq!(other.unwrap_err(), "engine is not a room; the rooms are docs");
}
