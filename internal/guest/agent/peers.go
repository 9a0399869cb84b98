// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/guest/sink/auto"
	"github.com/fairlead/fairlead/internal/guest/sink/gvproxy"
	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/guest/sink/vtunnel"
)

// newPeerSink makes a sink for another product's forwarder.
func (a *Agent) newPeerSink(s config.Sink) (auto.Sink, error) {
	memory := peer.Memory(a.stateFile(s.Name + ".json"))
	bridges := peer.NewBridges(peer.BridgeOptions{
		Listen: a.sockets.Listen, ListenPacket: a.sockets.ListenPacket,
		Serve: a.forward.CarryHidden, ServeUDP: a.forward.ServeUDP, Logger: a.log,
		Loopback: a.cfg.BridgeLoopback,
	})
	if s.Name == "gvproxy" {
		o := gvproxy.Options{Memory: memory, Bridges: bridges, Logger: a.log}
		if s.URL != "" {
			o.URLs = []string{s.URL}
		}
		return gvproxy.New(o)
	}
	return vtunnel.New(vtunnel.Options{URL: s.URL, Memory: memory, Bridges: bridges, Logger: a.log})
}

// stateFile returns the path of a file that this agent alone has, also if another one has
// its control socket in the same directory. It is beside the socket: the directory belongs
// to root and is empty after a reboot.
func (a *Agent) stateFile(name string) string { return a.cfg.Control + "." + name }
