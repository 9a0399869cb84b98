// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/status"
)

func TestVersionNamesWhatToUpdate(t *testing.T) {
	peer := func(version string) []status.Peer {
		return []status.Peer{{State: status.PeerConnected, Name: "desk", Version: version}}
	}
	for _, c := range []struct {
		name string
		list status.List
		want string
	}{
		{"nothing runs", status.List{}, "fairlead v1.2.0\n"},
		{"all equal", status.List{Role: "agent", Version: "v1.2.0", Peers: peer("v1.2.0")}, "fairlead v1.2.0\nrunning agent v1.2.0\nhost desk v1.2.0\n"},
		{"old process", status.List{Role: "agent", Version: "v1.1.0"}, "fairlead v1.2.0\nrunning agent v1.1.0: restart it, to run this program\n"},
		{"old host", status.List{Role: "agent", Version: "v1.2.0", Peers: peer("v1.1.0")}, "host desk v1.1.0: update fairlead on the host: the agent is newer\n"},
		{"old guest", status.List{Role: "host", Version: "v1.2.0", Peers: peer("v1.1.0")}, "guest desk v1.1.0: update the agent in the guest: the host is newer\n"},
		{
			"no protocol in common", status.List{Role: "agent", Version: "v1.2.0", Peers: []status.Peer{{
				State: status.PeerRefused, Code: "version", Error: "the agent speaks link protocol 2, the host 1: update the older one",
			}}}, "host was refused: the agent speaks link protocol 2, the host 1: update the older one\n",
		},
	} {
		var b strings.Builder
		if err := writeVersions(&b, "v1.2.0", c.list); err != nil || !strings.HasSuffix(b.String(), c.want) {
			t.Errorf("%s: %v\n%s\nwant\n%s", c.name, err, b.String(), c.want)
		}
	}
}
