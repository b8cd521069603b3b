//! Arguments of kernels, defined once: the macros produce constants and structs in Rust and their text in C, which
//! asserts the sizes (`csrc/layout/args.cuh`, written by `cargo run -p crossrail-kernels --example layout`). Fields are
//! numbers, arrays of numbers, or structs of these, in the same order on both sides.
#![allow(unsafe_code)]

use std::fmt::Write as _;
use std::mem::size_of;

use crossrail_cuda::KernelArgs;

macro_rules! constants {
    ($( $(#[doc = $doc:literal])+ $name:ident: $type:ident = $value:literal; )+) => {
        $( $(#[doc = $doc])+ pub const $name: $type = $value; )+

        fn constants(text: &mut String) {
            $(
                $( let _ = writeln!(text, "//{}", $doc); )+
                let _ = writeln!(text, "constexpr {} {} = {};\n", stringify!($type), stringify!($name), $name);
            )+
        }
    };
}

constants! {
    /// Threads of a block of the copying kernels: 8 warps.
    COPY_THREADS: u32 = 256;
    /// Threads of a block of `crossrail_rows`: 12 warps, which have 48 KiB of loads in flight.
    ROWS_THREADS: u32 = 384;
    /// Outcome of a wait: the flag has reached the value.
    FLAG_REACHED: u64 = 1;
    /// Outcome of a wait: timeout.
    FLAG_TIMED_OUT: u64 = 2;
}

/// A field of a struct in C, from its type in Rust: a number, another struct, or an array of either.
pub(crate) fn c_field(rust_type: &str, field: &str) -> String {
    match rust_type.strip_prefix('[').and_then(|array| array.strip_suffix(']')?.split_once(';')) {
        Some((item, len)) => format!("{} {field}[{}];", item.trim(), len.trim()),
        None => format!("{rust_type} {field};"),
    }
}

macro_rules! layouts {
    ($function:ident, $file:literal; $( $(#[doc = $doc:literal])+ $name:ident { $( $(#[doc = $field_doc:literal])+ $field:ident: $type:ty, )+ } )+) => {
        $(
            $(#[doc = $doc])+
            #[repr(C)]
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $name { $( $(#[doc = $field_doc])+ pub $field: $type, )+ }

            impl $name {
                /// Zeros.
                // SAFETY: numbers only, or arrays and structs of them.
                pub const ZERO: $name = unsafe { std::mem::zeroed() };
            }

            // SAFETY: repr(C); the kernel's struct is written from this definition, and asserts its size.
            unsafe impl KernelArgs for $name {}
        )+

        #[doc = concat!("The text of `", $file, "`.")]
        pub fn $function() -> String {
            let mut text = String::from($crate::args::HEADER);
            constants(&mut text);
            $(
                $( let _ = writeln!(text, "//{}", $doc); )+
                let _ = writeln!(text, "struct {} {{", stringify!($name));
                $(
                    $( let _ = writeln!(text, "    //{}", $field_doc); )+
                    let _ = writeln!(text, "    {}", $crate::args::c_field(stringify!($type), stringify!($field)));
                )+
                let _ = writeln!(text, "}};\n");
                let size = size_of::<$name>();
                let _ = writeln!(text, "static_assert(sizeof({0}) == {size}, \"{0}\");", stringify!($name));
                text.push('\n');
            )+
            text.truncate(text.trim_end().len());
            text.push('\n');
            text
        }
    };
}

pub(crate) const HEADER: &str = "\
// Written from crates/kernels/src by `cargo run -p crossrail-kernels --example layout`. Do not edit.
#pragma once

#include \"layout/types.cuh\"

";

layouts! {
    layout, "csrc/layout/args.cuh";
    /// An entry of a list to unpack: one copy, of any alignment.
    Piece {
        /// Source address: device memory, or host memory mapped for the GPU.
        src: u64,
        /// Destination address.
        dst: u64,
        /// Length in bytes.
        len: u64,
    }
    /// Arguments of `crossrail_unpack`.
    UnpackArgs {
        /// Address of the list, 8-byte aligned, in device memory or mapped host memory.
        pieces: u64,
        /// Number of its entries.
        count: u64,
    }
    /// Rows of a list, equally far apart.
    RowStride {
        /// Address of the first one.
        base: u64,
        /// Distance between them in bytes.
        stride: u64,
        /// Length of each in bytes.
        len: u64,
        /// Rows of the list before these.
        first: u64,
    }
    /// A list of rows: strides, and which of their rows. In place `i` is row `i` without indices, else row
    /// `i / period * step + index[i % period]`.
    RowsEnd {
        /// Address of the strides.
        strides: u64,
        /// Number of strides.
        count: u32,
        /// Rows of each stride, if all have as many; else 0.
        even: u32,
        /// Address of the indices, each a u32; 0 for none.
        index: u64,
        /// Number of indices.
        period: u64,
        /// What is added each time that the indices begin again.
        step: u64,
    }
    /// Arguments of `crossrail_rows`.
    RowsArgs {
        /// Where rows come from.
        src: RowsEnd,
        /// Where they go to. Rows in the same place are of the same length.
        dst: RowsEnd,
        /// The first place to copy.
        first: u64,
        /// Number of units: `parts` of each row.
        units: u64,
        /// Parts of the longest row, at least 1.
        parts: u64,
        /// Bytes of a part: a multiple of 16, and less than 2^31.
        part: u64,
        /// Units that a warp takes at a time: 1 to 32.
        batch: u64,
    }
    /// Arguments of `crossrail_put`.
    PutArgs {
        /// Destination address: memory of any GPU with peer access, or mapped host memory.
        dst: u64,
        /// Source address.
        src: u64,
        /// Length in bytes; 0 for the signal alone.
        len: u64,
        /// Bytes that a warp copies at a time, a multiple of 16; 0 for a default that depends on the length.
        part: u64,
        /// Address of the signal, 8-byte aligned, which one block sets; 0 for none.
        signal: u64,
        /// Value of the signal once all bytes have arrived.
        value: u64,
    }
    /// Arguments of `crossrail_flag_write`.
    FlagWriteArgs {
        /// Address of the flag, 8-byte aligned.
        flag: u64,
        /// Its new value.
        value: u64,
    }
    /// Arguments of `crossrail_flag_await`.
    FlagAwaitArgs {
        /// Address of the flag, 8-byte aligned.
        flag: u64,
        /// The value that it must reach.
        value: u64,
        /// Timeout in nanoseconds.
        limit_ns: u64,
        /// Address of a 64-bit word that becomes FLAG_REACHED or FLAG_TIMED_OUT.
        outcome: u64,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn fields_are_written_as_c_declares_them() {
        assert_eq!(super::c_field("u64", "len"), "u64 len;");
        assert_eq!(super::c_field("EpHeap", "heap"), "EpHeap heap;");
        assert_eq!(super::c_field("[u64; 8]", "blocks"), "u64 blocks[8];");
    }
}
