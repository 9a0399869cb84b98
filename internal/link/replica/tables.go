// SPDX-License-Identifier: Apache-2.0

package replica

import (
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

// Wanted are the ports that an agent wants to be open on the host.
func Wanted() Kind[port.Key, port.Fact] {
	return Kind[port.Key, port.Fact]{
		Name: "wanted", Check: func(f port.Fact) error { return f.Check(true) }, CheckKey: port.Key.Check, Max: wire.MaxPublications, MaxBytes: wire.MaxSetBytes,
		Size: port.Fact.TextBytes, Acked: true,
	}
}

// Outcomes are the host's answers to Wanted: what is open, and why the rest is not.
func Outcomes() Kind[port.Key, port.Answer] {
	return Kind[port.Key, port.Answer]{Name: "outcomes", Check: port.Answer.Check, CheckKey: port.Key.Check, Max: wire.MaxPublications, MaxBytes: wire.MaxSetBytes, Answers: "wanted"}
}

// Unpublished are the ports that the guest does not publish, for people to see. Their rows have
// neither a host address nor anything to dial.
func Unpublished() Kind[port.Key, port.Fact] {
	return Kind[port.Key, port.Fact]{
		Name: "unpublished", Check: func(f port.Fact) error { return f.Check(false) }, CheckKey: port.Key.Check, Max: wire.MaxUnpublished, MaxBytes: wire.MaxSetBytes,
		Rate: 1000,
	}
}

// Unread are the NAT rules that the agent does not understand, each its own key.
func Unread() Kind[wire.Unread, wire.Unread] {
	return Kind[wire.Unread, wire.Unread]{Name: "unread", Check: wire.Unread.Check, CheckKey: wire.Unread.Check, Max: wire.MaxUnread, MaxBytes: 1 << 20, Rate: 1000}
}
