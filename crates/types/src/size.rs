//! Parsing and formatting of sizes and durations. `GB` is 1e9 bytes and `GiB` is 2^30 bytes; output always names the
//! unit.

use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};

const SIZE_FORM: &str = "write bytes or a power of two: 4096, 64K, 2M, 1G, 1T (KiB, MiB, GiB, TiB mean the same)";
const DURATION_FORM: &str = "write seconds or a unit: 1.5, 30s, 500ms, 250us, 2m, 1h";
const UNITS: [(&str, u32); 4] = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];

/// Parses a size in bytes: `4096`, `64K`, `2M`, `1G`, `1T` (powers of two), or the same with `KiB`, `MiB` and so on.
///
/// # Errors
/// [`ErrorKind::Usage`], with the text and the accepted form. `64KB` is rejected because KB is ambiguous (1000 or 1024
/// bytes), and so is anything that does not fit in 64 bits.
pub fn parse_size(text: &str) -> Result<u64> {
    let bad = |why: &str| Error::new(ErrorKind::Usage, "size", format!("{:?} {why}", clip(text))).with_hint(SIZE_FORM);
    let text = text.trim();
    let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    let unit = unit.trim_start();
    if digits.is_empty() {
        return Err(bad("is not a size"));
    }
    let shift = match unit {
        "" | "B" => 0,
        _ => shift_of(unit).ok_or_else(|| {
            let decimal = unit.len() == 2 && unit.ends_with(['B', 'b']) && shift_of(&unit[..1]).is_some();
            bad(if decimal { "is ambiguous: powers of ten or of two" } else { "is not a size" })
        })?,
    };
    let number: u64 = digits.parse().map_err(|_| bad("does not fit in 64 bits"))?;
    number.checked_mul(1 << shift).ok_or_else(|| bad("does not fit in 64 bits"))
}

fn shift_of(unit: &str) -> Option<u32> {
    UNITS
        .iter()
        .find(|(letter, _)| {
            unit.eq_ignore_ascii_case(letter)
                || (unit.len() == 3 && unit.is_ascii() && unit[..1].eq_ignore_ascii_case(letter) && &unit[1..] == "iB")
        })
        .map(|(_, shift)| *shift)
}

/// Parses several sizes: a range `1:4M`, doubled from the first to the last (which is always included), or a list
/// `1,2,64K`.
///
/// # Errors
/// [`ErrorKind::Usage`] for an invalid size, and for a range that is descending or starts at 0.
pub fn parse_sizes(text: &str) -> Result<Vec<u64>> {
    let Some((first, last)) = text.split_once(':') else {
        return text.split(',').map(parse_size).collect();
    };
    let (first, last) = (parse_size(first)?, parse_size(last)?);
    let bad = |why: String| {
        Err(Error::new(ErrorKind::Usage, "sizes", format!("{:?} {why}", clip(text)))
            .with_hint("write MIN:MAX for a doubling range, such as 1:4M, or a list, such as 1,2,64K"))
    };
    if first == 0 {
        return bad("starts at 0, which cannot be doubled".to_owned());
    }
    if last < first {
        return bad("is a descending range".to_owned());
    }
    let mut sizes: Vec<u64> =
        std::iter::successors(Some(first), |size| size.checked_mul(2)).take_while(|size| *size < last).collect();
    sizes.push(last);
    Ok(sizes)
}

/// Formats a size in the shortest exact form that [`parse_size`] accepts: `64K`, `2M`, `1G`, or plain bytes.
pub fn format_size(bytes: u64) -> String {
    for (letter, shift) in UNITS {
        if bytes != 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{letter}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// Parses a duration: `500ms`, `30s`, `2m`, `1h`, `250us`, or plain seconds such as `1.5`. Resolution: 1 ns.
///
/// # Errors
/// [`ErrorKind::Usage`], with the text and the accepted form.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let bad = || {
        Error::new(ErrorKind::Usage, "duration", format!("{:?} is not a duration", clip(text))).with_hint(DURATION_FORM)
    };
    let text = text.trim();
    let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    let nanos_per_unit: u128 = match unit.trim_start() {
        "" | "s" => 1_000_000_000,
        "ms" => 1_000_000,
        "us" | "µs" => 1_000,
        "ns" => 1,
        "m" | "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return Err(bad()),
    };
    let nanos = decimal_times(digits, nanos_per_unit).ok_or_else(bad)?;
    Ok(Duration::from_nanos(u64::try_from(nanos).map_err(|_| bad())?))
}

/// `digits` (such as `12`, `1.5`, `.25`) times `factor`, rounded down. Exact, unlike a float.
fn decimal_times(digits: &str, factor: u128) -> Option<u128> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut nanos = u128::from(whole).checked_mul(factor)?;
    let mut place = factor;
    for digit in fraction.bytes() {
        place /= 10;
        nanos = nanos.checked_add(u128::from(digit - b'0') * place)?;
    }
    Some(nanos)
}

/// Formats a duration in the shortest exact form that [`parse_duration`] accepts: `30s`, `1500ms`, `250us`, `2m`.
pub fn format_duration(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    let units =
        [(3_600_000_000_000, "h"), (60_000_000_000, "m"), (1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")];
    for (per_unit, unit) in units {
        // `60s` and `1500ms` are easier to read than `1m`; from two units on the larger unit wins.
        let below_two = per_unit >= 60_000_000_000 && nanos < 2 * per_unit;
        if nanos != 0 && nanos.is_multiple_of(per_unit) && !below_two {
            return format!("{}{unit}", nanos / per_unit);
        }
    }
    if nanos == 0 { "0s".to_owned() } else { format!("{nanos}ns") }
}

/// Formats bytes in units of 1e9: `67.11 GB` (below that `MB`, `kB`, `B`).
pub fn format_gb(bytes: u64) -> String {
    scaled(bytes, &[(1e9, "GB"), (1e6, "MB"), (1e3, "kB")])
}

/// Formats bytes in units of 2^30: `1.50 GiB` (below that `MiB`, `KiB`, `B`).
pub fn format_gib(bytes: u64) -> String {
    scaled(bytes, &[(1_073_741_824.0, "GiB"), (1_048_576.0, "MiB"), (1_024.0, "KiB")])
}

/// Formats a rate in units of 1e9 bytes per second: `10.90 GB/s`; `- GB/s` if the time is zero.
pub fn format_gb_per_s(bytes: u64, time: Duration) -> String {
    if time.is_zero() {
        return "- GB/s".to_owned();
    }
    format!("{:.2} GB/s", bytes as f64 / time.as_secs_f64() / 1e9)
}

fn scaled(bytes: u64, units: &[(f64, &str)]) -> String {
    for (per_unit, unit) in units {
        if bytes as f64 >= *per_unit {
            return format!("{:.2} {unit}", bytes as f64 / per_unit);
        }
    }
    format!("{bytes} B")
}

/// Truncates user input to 64 characters for an error message.
fn clip(text: &str) -> String {
    if text.chars().count() <= 64 {
        return text.to_owned();
    }
    text.chars().take(61).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("17B", 17),
            ("64K", 65536),
            ("64k", 65536),
            ("64KiB", 65536),
            ("64kiB", 65536),
            (" 2M ", 2 << 20),
            ("2 MiB", 2 << 20),
            ("1G", 1 << 30),
            ("1GiB", 1 << 30),
            ("3T", 3 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn an_invalid_size_is_reported_with_the_accepted_form() {
        for text in
            ["", "K", "-1", "1.5M", "64X", "0x10", "1_000", "64 K K", "64KiBB", "1é", "12éB", "64KIB", "∞", "1e9"]
        {
            let error = parse_size(text).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Usage);
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
            assert!(error.to_string().contains("64K, 2M, 1G"), "{error}");
        }
    }

    #[test]
    fn ambiguous_decimal_units_are_rejected() {
        for text in ["64KB", "1GB", "2mb"] {
            assert!(parse_size(text).unwrap_err().detail.contains("powers of ten or of two"), "{text}");
        }
    }

    #[test]
    fn overflow_is_an_error() {
        for text in ["18446744073709551616", "16777216T", "99999999999999999999999999G"] {
            assert!(parse_size(text).unwrap_err().detail.contains("64 bits"), "{text}");
        }
        assert_eq!(parse_size("16777215T"), Ok(16_777_215 << 40));
    }

    #[test]
    fn long_input_is_truncated_in_the_error() {
        let error = parse_size(&"x".repeat(10_000)).unwrap_err();
        assert!(error.to_string().len() < 300);
    }

    #[test]
    fn ranges_double_and_include_both_ends() {
        assert_eq!(parse_sizes("1:8").unwrap(), [1, 2, 4, 8]);
        assert_eq!(parse_sizes("3:10").unwrap(), [3, 6, 10]);
        assert_eq!(parse_sizes("4K:4K").unwrap(), [4096]);
        let sizes = parse_sizes("1:4M").unwrap();
        assert_eq!((sizes.len(), sizes[22]), (23, 4 << 20));
        assert_eq!(parse_sizes("1:18446744073709551615").unwrap().len(), 65);
    }

    #[test]
    fn lists_keep_their_order() {
        assert_eq!(parse_sizes("1,2,64K").unwrap(), [1, 2, 65536]);
        assert_eq!(parse_sizes("64K, 0").unwrap(), [65536, 0]);
    }

    #[test]
    fn bad_ranges_and_lists_are_errors() {
        for text in ["", ",", "1,,2", "1,", ":", "1:", ":4M", "0:4", "8:4", "1:2:4"] {
            assert_eq!(parse_sizes(text).unwrap_err().kind, ErrorKind::Usage, "{text}");
        }
    }

    #[test]
    fn formatted_sizes_parse_back() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1"),
            (1000, "1000"),
            (1024, "1K"),
            (65536, "64K"),
            (3 << 20, "3M"),
            (1 << 30, "1G"),
            (5 << 40, "5T"),
        ] {
            assert_eq!(format_size(bytes), text);
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for shift in 0..64 {
            let bytes = u64::MAX << shift;
            assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }
    }

    #[test]
    fn durations() {
        for (text, nanos) in [
            ("500ms", 500_000_000),
            ("30s", 30_000_000_000),
            ("2m", 120_000_000_000),
            ("1h", 3_600_000_000_000),
            ("1.5", 1_500_000_000),
            (".25", 250_000_000),
            ("2.", 2_000_000_000),
            ("0.1", 100_000_000),
            ("250us", 250_000),
            ("7 ns", 7),
            ("0.0000000019", 1),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
        for text in ["", ".", "s", "-1", "1e3", "inf", "NaN", "1.2.3s", "3d", "99999999999999999999", "18446744073.8"] {
            let error = parse_duration(text).unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
            assert!(error.to_string().contains("500ms"), "{error}");
        }
    }

    #[test]
    fn formatted_durations_parse_back() {
        for (text, nanos) in [
            ("30s", 30_000_000_000),
            ("1500ms", 1_500_000_000),
            ("60s", 60_000_000_000),
            ("2m", 120_000_000_000),
            ("2h", 7_200_000_000_000),
            ("250us", 250_000),
            ("1ns", 1),
            ("0s", 0),
        ] {
            let duration = Duration::from_nanos(nanos);
            assert_eq!(format_duration(duration), text);
            assert_eq!(parse_duration(text), Ok(duration));
        }
    }

    #[test]
    fn gb_and_gib_are_named() {
        assert_eq!(format_gb(67_108_864), "67.11 MB");
        assert_eq!(format_gib(67_108_864), "64.00 MiB");
        assert_eq!(format_gb(1_000_000_000), "1.00 GB");
        assert_eq!(format_gib(1_610_612_736), "1.50 GiB");
        assert_eq!(format_gb(999), "999 B");
        assert_eq!(format_gib(1023), "1023 B");
        assert_eq!(format_gb_per_s(2_000_000_000, Duration::from_millis(500)), "4.00 GB/s");
        assert_eq!(format_gb_per_s(1, Duration::ZERO), "- GB/s");
    }
}
