// Links between machines: one TCP connection each. Made by runtime/link_maker.cc from a connection whose handshake is
// over.
#pragma once

#include <memory>
#include <string>

#include "base/descriptor.h"
#include "transport/link.h"

namespace trainmover::tcp {

/// Sets what makes a dead or cut-off peer noticed within `timeout_ms`, and sends small messages at once. Both settings
/// are needed: keepalive speaks for idle connections, the user time-out for those with unacknowledged data.
void configureSocket(int fd, std::uint64_t timeout_ms);

/// Takes over a connected, non-blocking socket.
std::unique_ptr<Link> makeLink(Descriptor socket);

}  // namespace trainmover::tcp
