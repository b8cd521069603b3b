//! Words and openings that are counted, and the matcher that finds them in a passage.

use std::collections::HashMap;

use super::passages::{Kind, Passage};

/// A word, phrase or opening that a standard term replaces.
pub(crate) struct Word {
    /// Its name in reports.
    pub(crate) name: &'static str,
    /// Each phrase is a sequence of words between spaces; `a|b` is either, `*` any run of letters at the front, `!a|b`
    /// neither. The first word is plain.
    phrases: &'static [&'static str],
    /// Words before it that give it another, permitted meaning.
    unless_after: &'static str,
    /// Phrases after it that do.
    unless_before: &'static [&'static str],
    /// Counted only at the end of a clause or before a word such as `of` or `is`: elsewhere it belongs to a noun.
    alone: bool,
    /// Counted only as the first words of a doc comment.
    opens: bool,
    /// The term to use.
    pub(crate) instead: &'static str,
}

const fn word(name: &'static str, phrases: &'static [&'static str], instead: &'static str) -> Word {
    Word { name, phrases, unless_after: "", unless_before: &[], alone: false, opens: false, instead }
}

const fn opening(name: &'static str, phrases: &'static [&'static str]) -> Word {
    Word { opens: true, ..word(name, phrases, "a noun that names the item") }
}

/// Adjectives after `the most`, by which it is a superlative; without them it is a maximum.
const SUPERLATIVE: &[&str] =
    &["*ly|*ant|*ent|*ive|*ble|*ful|*ous|*ed|*al", "common|specific|strict|urgent|squares|loaded|advanced"];

/// All of them.
pub(crate) const WORDS: &[Word] = &[
    opening("What ...", &["what"]),
    opening("How ...", &["how"]),
    opening("Where ...", &["where"]),
    opening("Who ...", &["who|whose|whom"]),
    opening("Whether ...", &["whether"]),
    opening("Those ...", &["those"]),
    opening("That of ...", &["that of"]),
    opening("The same ...", &["the same"]),
    word("of ours", &["of ours|theirs|mine|yours"], "our, their"),
    Word {
        alone: true,
        ..word("of the peer's", &["of the|a|an|this|that|each|another *'s"], "the peer's X, X of the peer")
    },
    Word {
        unless_before: &["from|up|first|second|last|next|before|after|true"],
        ..word("come", &["come|comes|came|coming"], "receive, arrive, follow, return")
    },
    word("say", &["say|says|said|saying"], "report, state, publish"),
    Word {
        unless_before: &["apart", "* apart", "* * apart", "* * * apart"],
        ..word("tell", &["tell|tells|told|telling"], "notify, report, publish")
    },
    word("hear", &["hear|hears|heard|hearing"], "receive, be notified"),
    word("whoever", &["whoever|whomever"], "caller, peer, owner, reader, writer"),
    word("nobody", &["nobody|somebody|anybody"], "no caller, a peer, any thread"),
    Word { alone: true, ..word("the one", &["the one|ones"], "the noun itself") },
    Word {
        unless_after: "a|an|the|one|each|every|any|this|that|no",
        unless_before: &["place"],
        ..word(
            "put in",
            &["put|puts|putting in|into", "put|puts|putting it|them in|into"],
            "enqueue, submit, post, write",
        )
    },
    word("bring in", &["bring|brings|brought|bringing in"], "enqueue, receive"),
    word("under way", &["under way", "underway"], "in flight, outstanding"),
    word("on the way", &["on the|its|their way"], "in flight"),
    Word { alone: true, ..word("go on", &["go|goes|went|going|gone on"], "continue") },
    word(
        "give back",
        &["give|gives|gave|given|giving back", "give|gives|gave|given|giving it|them|one|this back"],
        "return, release",
    ),
    Word {
        unless_after: "far|left|leave|leaves|lag|lags|lagging|lagged|fall|falls|falling|fell",
        unless_before: &["a|an|the|one|its|another firewall|firewalls|nat|proxy|switch|bridge|router", "nat|firewalls"],
        ..word("behind", &["behind"], "after, following")
    },
    word("beside", &["beside"], "in addition to, next to, compared with"),
    word("so many", &["so many"], "the count"),
    word("so long", &["so long"], "the duration, timeout, interval"),
    word("so often", &["so often"], "the rate, interval"),
    Word { unless_before: SUPERLATIVE, ..word("the most", &["the most"], "maximum, largest") },
    Word { unless_before: SUPERLATIVE, ..word("the least", &["the least"], "minimum, smallest") },
    Word {
        unless_after: "there|here",
        ..word("is no X", &["is|are|was|were no !longer|more|less|fewer|different|better|worse|such"], "is not an X")
    },
    word("makes no sense", &["make|makes|made|making no sense"], "is invalid, and why"),
    word("the long way", &["the long way"], "the slow path, the fallback"),
    word("go the other way", &["go|goes|went|going the other way"], "fall back"),
    word("take for dead", &["for dead"], "declare failed"),
    word("stranger", &["stranger|strangers"], "unauthenticated client, other user"),
    word("mend", &["mend|mends|mended|mending"], "fix, repair"),
    word("how-manieth", &["how-manieth"], "sequence number"),
    word("look again", &["look|looks|looked|looking again", "look|looks|looked|looking for the word"], "poll, recheck"),
    word(
        "hands on, off",
        &["have|has|had|having|take|takes|took|taken|taking|its|their|our hands on|off|from"],
        "access, release",
    ),
    word("memory that others map", &["memory that others map"], "peer-mapped memory"),
    word("is gone", &["is|are|was|were|be|been|has|have|had gone"], "is lost, failed, evicted"),
    Word {
        unless_before: &["down|up|wrong|through|from|to|into|out|over|back|via|on|the"],
        ..word("went", &["went"], "was lost, failed, sent")
    },
];

/// Words that do not continue a noun phrase.
const CLOSED: &str = "that|which|who|whom|whose|of|in|on|with|without|at|by|for|to|from|into|over|and|or|but|is|are|was|\
                      were|has|have|had|may|must|can|does|do|did|will|would|when|while|where|if|as|than|not|nor|after|\
                      before|until|since|there|then|too|also|only|so|it|because|once";

/// A word of a passage, or what stands between words.
struct Token {
    /// In small letters; [`CODE`] for an identifier, figure or acronym; [`BREAK`] for the end of a clause.
    text: String,
    line: usize,
}

const CODE: &str = "`";
const BREAK: &str = ".";

/// The phrases of [`WORDS`] by their first words, with the indices of their entries.
pub(crate) struct Finder(HashMap<&'static str, Vec<(usize, &'static str)>>);

impl Finder {
    pub(crate) fn new() -> Self {
        let mut phrases: HashMap<&str, Vec<(usize, &str)>> = HashMap::new();
        for (index, word) in WORDS.iter().enumerate() {
            for phrase in word.phrases {
                for first in phrase.split(' ').next().unwrap_or_default().split('|') {
                    phrases.entry(first).or_default().push((index, phrase));
                }
            }
        }
        Self(phrases)
    }

    #[cfg(test)]
    pub(crate) fn firsts(&self) -> impl Iterator<Item = &str> {
        self.0.keys().copied()
    }

    /// The places in a passage: the index in [`WORDS`], and the line.
    pub(crate) fn find(&self, passage: &Passage) -> Vec<(usize, usize)> {
        let tokens = tokens(passage);
        let first = tokens.iter().position(|token| token.text != BREAK);
        let mut found = Vec::new();
        for (at, token) in tokens.iter().enumerate() {
            for (index, phrase) in self.0.get(token.text.as_str()).into_iter().flatten() {
                let word = &WORDS[*index];
                let opens = passage.kind == Kind::Doc && Some(at) == first;
                if (opens || !word.opens)
                    && let Some(length) = matches(phrase, &tokens[at..])
                    && is_meant(word, &tokens, at, at + length)
                {
                    found.push((*index, token.line));
                }
            }
        }
        found
    }
}

/// Whether what surrounds the match leaves the word its meaning.
fn is_meant(word: &Word, tokens: &[Token], start: usize, end: usize) -> bool {
    let previous = start.checked_sub(1).map_or(BREAK, |at| tokens[at].text.as_str());
    let next = tokens.get(end).map_or(BREAK, |token| token.text.as_str());
    !fits(word.unless_after, previous)
        && !word.unless_before.iter().any(|phrase| matches(phrase, &tokens[end..]).is_some())
        && (!word.alone || next == BREAK || fits(CLOSED, next))
}

/// The number of tokens of `phrase` if the passage goes like it here.
fn matches(phrase: &str, tokens: &[Token]) -> Option<usize> {
    let mut length = 0;
    for element in phrase.split(' ') {
        let token = tokens.get(length)?;
        let fits = match element.strip_prefix('!') {
            Some(others) => !fits(others, &token.text),
            None => fits(element, &token.text),
        };
        if token.text == BREAK || !fits {
            return None;
        }
        length += 1;
    }
    Some(length)
}

fn fits(alternatives: &str, text: &str) -> bool {
    alternatives.split('|').any(|alternative| match alternative.strip_prefix('*') {
        Some(suffix) => text != BREAK && text.ends_with(suffix) && text != suffix,
        None => alternative == text,
    })
}

fn tokens(passage: &Passage) -> Vec<Token> {
    let mut found: Vec<Token> = Vec::new();
    for (line, text) in passage.lines() {
        if text.trim().is_empty() {
            found.push(Token { text: BREAK.to_owned(), line });
        }
        for chunk in text.split_whitespace() {
            let begins = chunk.trim_start_matches(|letter| OPENS.contains(letter));
            let trimmed = begins.trim_end_matches(|letter| ENDS.contains(letter));
            let mut push = |text: &str| found.push(Token { text: text.to_owned(), line });
            if trimmed.is_empty() {
                push(BREAK);
                continue;
            }
            if chunk.starts_with(['(', '[']) {
                push(BREAK);
            }
            let letters = trimmed.chars().all(|letter| letter.is_alphabetic() || "'-’".contains(letter));
            let acronym = trimmed.len() > 1 && !trimmed.chars().any(char::is_lowercase);
            if letters && !acronym && !trimmed.starts_with('-') && !chunk.contains("()") {
                push(&trimmed.to_lowercase().replace('’', "'"));
            } else {
                push(CODE);
            }
            if begins.len() > trimmed.len() && begins[trimmed.len()..].contains(STOPS) {
                push(BREAK);
            }
        }
    }
    found
}

const OPENS: &str = "([{\"'*_“|";
const ENDS: &str = ")]}\"'*_.,;:!?…”|-–—#";
const STOPS: [char; 10] = ['.', ',', ';', ':', '!', '?', ')', ']', '…', '|'];
