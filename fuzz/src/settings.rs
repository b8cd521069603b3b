use crossrail_types::{Settings, format_duration, format_size, parse_duration, parse_size, parse_sizes};

/// Text as a user may write it: every setting, sizes, durations. What is read must be shown so that it reads back.
pub fn settings(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    if let Ok(size) = parse_size(&text) {
        assert_eq!(parse_size(&format_size(size)), Ok(size));
    }
    if let Ok(sizes) = parse_sizes(&text) {
        assert!(!sizes.is_empty());
    }
    if let Ok(duration) = parse_duration(&text) {
        assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
    }
    for name in Settings::NAMES {
        let mut settings = Settings::default();
        match settings.set(name, &text) {
            Ok(()) => {
                settings.check().unwrap_or_else(|error| panic!("{name}={text:?} is read but does not hold: {error}"));
                let again = settings.shown().into_iter().filter_map(|(name, value)| Some((name, value?)));
                let again = Settings::from_pairs(again).unwrap_or_else(|error| panic!("{name}={text:?}: {error}"));
                assert_eq!(settings.shown(), again.shown());
            }
            Err(error) => assert!(error.operation == **name && error.hint.is_some(), "{error}"),
        }
    }
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let _ = Settings::from_pairs(pairs);
}
