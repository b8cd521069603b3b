// Two processes: `two_processes_cpp listen` and `two_processes_cpp connect ADDR`.
#include <crossrail.hpp>

#include <array>
#include <iostream>

int main(int argc, char **argv) try {
    const crossrail::context context;
    const crossrail::worker worker(context);
    if (argc == 3) {
        const std::string hello = "hello from the other side";
        worker.connect(argv[2]).send(hello.data(), hello.size(), 7).wait();
        return 0;
    }
    std::cout << "listening: " << argv[0] << " connect " << worker.listens() << std::endl;
    std::array<char, 64> inbox;
    const crossrail::endpoint peer = worker.accept();
    const crossrail::request message = worker.recv(inbox.data(), inbox.size(), 7);
    const xrail_receipt receipt = message.wait();
    std::cout << std::string(inbox.data(), receipt.bytes) << " (" << message.report() << ")\n";
    return 0;
} catch (const crossrail::error &failure) {
    std::cerr << failure.what() << '\n';
    return 1;
}
