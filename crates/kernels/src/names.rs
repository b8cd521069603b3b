//! Names of kernels as the compiler writes them into machine code.

/// The mangled name of a kernel that takes one `A`, by value: `qualified` names it with its namespaces. A name without
/// namespaces is that of an `extern "C"` kernel, which stays as it is.
pub fn mangled<A>(qualified: &str) -> String {
    if !qualified.contains("::") {
        return qualified.to_owned();
    }
    let named = |part: &str| format!("{}{part}", part.len());
    let parts: String = qualified.split("::").map(named).collect();
    let path = std::any::type_name::<A>();
    format!("_ZN{parts}E{}", named(path.rsplit("::").next().unwrap_or(path)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PutArgs;

    #[test]
    fn names_are_mangled_as_the_itanium_abi_has_it() {
        assert_eq!(mangled::<PutArgs>("crossrail_put"), "crossrail_put");
        assert_eq!(mangled::<PutArgs>("crossrail::ep::rank::put"), "_ZN9crossrail2ep4rank3putE7PutArgs");
    }
}
