// Listening and connecting, for the control plane. Abstract unix sockets within a machine (they belong to the network
// namespace, leave no file and pass descriptors), TCP between machines.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/descriptor.h"

namespace trainmover {

/// Listens on a free port of `address` (numeric IPv4 or IPv6); `bound` becomes "address:port". Throws TransportError.
Descriptor listenTcp(const std::string& address, std::string& bound);
/// Listens on the abstract name `name`.
Descriptor listenUnix(const std::string& name);

/// The next connection, non-blocking; none when there is none now.
Descriptor acceptOn(const Descriptor& listener);

/// Starts to connect, without blocking. Returns an empty descriptor and sets `error` when it failed at once.
Descriptor connectTcp(const std::string& address, int& error);
Descriptor connectUnix(const std::string& name, int& error);
/// Outcome of a connect that was under way: 0 or an errno value.
int connectError(const Descriptor& socket);

/// Sends all of `data`, with `descriptors` attached where it is a unix socket; false when the socket would not take it.
bool sendWith(int fd, const void* data, std::size_t bytes, const std::vector<int>& descriptors);
/// Looks at what has come without consuming it; descriptors that came along are appended. -1: error or end, 0: nothing.
long peekWith(int fd, void* data, std::size_t bytes, bool& ended);
/// Consumes; descriptors that come along are appended to `received`, at most `limit` in all.
long receiveWith(int fd, void* data, std::size_t bytes, std::vector<Descriptor>& received, std::size_t limit);

}  // namespace trainmover
