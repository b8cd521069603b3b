//! The built-in store, its server and clients over loopback.

mod bounds;
mod ends;
mod help;

use crossrail_control::conformance;

use help::Fixture;

#[test]
fn conforms() {
    let fixture = Fixture::start();
    conformance::run("built in", "suite/", &|| fixture.client());
}

#[test]
fn conforms_with_a_secret() {
    let fixture = Fixture::with_secret("correct horse battery");
    conformance::run("built in, secret", "suite/", &|| fixture.client());
}
