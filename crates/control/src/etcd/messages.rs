//! The messages of etcd's JSON gateway: bytes in base64, 64-bit numbers as text, default values omitted.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes in base64")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                STANDARD.decode(text).map(Bytes).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// A 64-bit number. Written as text; read as text or number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Number(pub(super) i64);

impl Number {
    /// A revision or count, which are never negative.
    pub(super) fn unsigned(self) -> u64 {
        u64::try_from(self.0).unwrap_or(0)
    }
}

impl From<u64> for Number {
    fn from(value: u64) -> Number {
        Number(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        struct Any;
        impl Visitor<'_> for Any {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a 64-bit number, or one as text")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Number, E> {
                text.parse().map(Number).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Number, E> {
                Ok(Number(value))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Number, E> {
                i64::try_from(value).map(Number).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

fn is_zero(number: &Number) -> bool {
    number.0 == 0
}

#[derive(Debug, Serialize)]
pub(super) struct Put {
    pub(super) key: Bytes,
    pub(super) value: Bytes,
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) lease: Number,
}

/// The keys from `key` up to, not including, `range_end`; or `key` only.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Range {
    pub(super) key: Bytes,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) range_end: Option<Bytes>,
}

#[derive(Debug, Serialize)]
pub(super) struct Txn {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) compare: Vec<Compare>,
    pub(super) success: Vec<Operation>,
}

/// Precondition: `key` was last written at `mod_revision`, or does not exist if 0.
#[derive(Debug, Serialize)]
pub(super) struct Compare {
    pub(super) key: Bytes,
    pub(super) target: &'static str,
    pub(super) result: &'static str,
    pub(super) mod_revision: Number,
}

#[derive(Debug, Serialize)]
pub(super) enum Operation {
    #[serde(rename = "request_put")]
    Put(Put),
    #[serde(rename = "request_range")]
    Range(Range),
}

#[derive(Debug, Serialize)]
pub(super) struct WatchRequest {
    pub(super) create_request: WatchCreate,
}

#[derive(Debug, Serialize)]
pub(super) struct WatchCreate {
    #[serde(flatten)]
    pub(super) range: Range,
    pub(super) start_revision: Number,
}

#[derive(Debug, Serialize)]
pub(super) struct LeaseGrant {
    #[serde(rename = "TTL")]
    pub(super) ttl: Number,
}

#[derive(Debug, Serialize)]
pub(super) struct LeaseName {
    #[serde(rename = "ID")]
    pub(super) id: Number,
}

/// A request without fields.
#[derive(Debug, Serialize)]
pub(super) struct Nothing {}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    pub(super) revision: Number,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    pub(super) key: Bytes,
    pub(super) value: Bytes,
    pub(super) mod_revision: Number,
}

/// The answer to every request that reads or writes keys; each kind fills its own fields.
#[derive(Debug, Deserialize)]
pub(super) struct Done {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
    #[serde(default)]
    pub(super) deleted: Number,
    #[serde(default)]
    pub(super) succeeded: bool,
    #[serde(default)]
    pub(super) responses: Vec<DoneOne>,
}

/// One operation of a transaction.
#[derive(Debug, Deserialize)]
pub(super) struct DoneOne {
    #[serde(default)]
    pub(super) response_range: Kvs,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Kvs {
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LeaseState {
    #[serde(rename = "ID")]
    pub(super) id: Number,
    /// Seconds; 0 if the lease does not exist.
    #[serde(rename = "TTL")]
    pub(super) ttl: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct Status {
    pub(super) version: String,
}

/// One line of a streamed answer.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Line<T> {
    Result(T),
    Error(Fault),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WatchLine {
    pub(super) created: bool,
    pub(super) canceled: bool,
    pub(super) compact_revision: Number,
    pub(super) cancel_reason: String,
    pub(super) events: Vec<Change>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Change {
    #[serde(default, rename = "type")]
    pub(super) kind: Kind,
    pub(super) kv: KeyValue,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Kind {
    #[default]
    Put,
    Delete,
}

/// An error with its gRPC code. Within a stream the fields have other names.
#[derive(Debug, Deserialize)]
pub(super) struct Fault {
    #[serde(alias = "grpc_code")]
    pub(super) code: u32,
    pub(super) message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_as_etcd_documents_them() {
        let put = |lease| Put { key: Bytes(b"foo".to_vec()), value: Bytes(b"bar".to_vec()), lease: Number(lease) };
        let text = |value: &Txn| serde_json::to_string(value).unwrap();
        assert_eq!(serde_json::to_string(&put(0)).unwrap(), r#"{"key":"Zm9v","value":"YmFy"}"#);
        let compare = Compare { key: Bytes(b"foo".to_vec()), target: "MOD", result: "EQUAL", mod_revision: Number(2) };
        assert_eq!(
            text(&Txn { compare: vec![compare], success: vec![Operation::Put(put(7))] }),
            r#"{"compare":[{"key":"Zm9v","target":"MOD","result":"EQUAL","mod_revision":"2"}],"success":[{"request_put":{"key":"Zm9v","value":"YmFy","lease":"7"}}]}"#
        );
    }

    #[test]
    fn answers_are_read_with_numbers_in_either_form_and_defaults_left_out() {
        let line = r#"{"result":{"header":{"revision":"3"},"events":[{"kv":{"key":"YQ==","mod_revision":2,"value":"MQ=="}},
            {"type":"DELETE","kv":{"key":"YQ==","mod_revision":"3"}}]}}"#;
        let Line::Result(WatchLine { events, created, canceled, .. }) = serde_json::from_str(line).unwrap() else {
            panic!("no result")
        };
        assert!(!created && !canceled);
        assert_eq!(events.iter().map(|change| change.kind).collect::<Vec<_>>(), [Kind::Put, Kind::Delete]);
        assert_eq!((&events[0].kv.value.0[..], events[0].kv.mod_revision), (&b"1"[..], Number(2)));
        let Line::<WatchLine>::Error(fault) = serde_json::from_str(
            r#"{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader","http_status":"x"}}"#,
        )
        .unwrap() else {
            panic!("no error")
        };
        assert_eq!((fault.code, fault.message.as_str()), (14, "etcdserver: no leader"));
        assert!(serde_json::from_str::<Done>(r#"{"header":{"revision":"many"}}"#).is_err());
        assert!(serde_json::from_str::<Done>(r#"{"header":{},"kvs":[{"key":"?"}]}"#).is_err());
    }
}
