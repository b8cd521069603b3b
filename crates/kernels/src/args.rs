//! What kernels take. Defined here, once: the macros make constants and structs in Rust and their text in C, which asserts the size
//! (`csrc/layout/args.cuh`, written by `cargo run -p crossrail-kernels --example layout`). Fields are numbers, arrays of
//! numbers, or structs of these, in the same order on both sides.
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
    /// The threads of a block of the kernels that copy: 8 warps.
    COPY_THREADS: u32 = 256;
    /// The bytes that a warp of `crossrail_copy` takes at a time.
    COPY_PART: u64 = 16384;
    /// The bytes of one stage of `crossrail_copy_bulk`, in shared memory.
    BULK_STAGE: u32 = 16384;
    /// How many stages a block of it has.
    BULK_STAGES: u32 = 12;
    /// What a waiting kernel says: the flag has reached the value.
    FLAG_REACHED: u64 = 1;
    /// What a waiting kernel says: the time was over first.
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
    /// One entry of a list to unpack: bytes that go from one place to another. Any alignment.
    Piece {
        /// Where they are: device memory, or host memory that the GPU reaches.
        src: u64,
        /// Where they go.
        dst: u64,
        /// How many bytes.
        len: u64,
    }
    /// What `crossrail_unpack` takes.
    UnpackArgs {
        /// The address of the list, 8-byte aligned, in device memory or mapped host memory.
        pieces: u64,
        /// How many entries it has.
        count: u64,
    }
    /// What `crossrail_copy` and `crossrail_copy_bulk` take.
    CopyArgs {
        /// Where the bytes go.
        dst: u64,
        /// Where they are.
        src: u64,
        /// How many bytes.
        len: u64,
    }
    /// What `crossrail_put` takes.
    PutArgs {
        /// Where the bytes go: memory of any GPU that is reached, or host memory.
        dst: u64,
        /// Where they are.
        src: u64,
        /// How many bytes; 0 for the signal alone.
        len: u64,
        /// The bytes that a warp takes at a time, a multiple of 16; 0 for what suits the length.
        part: u64,
        /// The address of the signal, 8-byte aligned; 0 for none.
        signal: u64,
        /// What the signal becomes once all bytes are there.
        value: u64,
        /// The address of a 64-bit number in this GPU's memory that is 0 and becomes 0 again, by which several blocks
        /// count themselves: of this launch alone as long as it runs. 0 for none.
        counter: u64,
    }
    /// What `crossrail_flag_write` takes.
    FlagWriteArgs {
        /// The address of the flag, 8-byte aligned.
        flag: u64,
        /// What it becomes.
        value: u64,
    }
    /// What `crossrail_flag_await` takes.
    FlagAwaitArgs {
        /// The address of the flag, 8-byte aligned.
        flag: u64,
        /// What it must have reached.
        value: u64,
        /// The longest wait, in nanoseconds.
        limit_ns: u64,
        /// The address of a 64-bit number that becomes FLAG_REACHED or FLAG_TIMED_OUT.
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
