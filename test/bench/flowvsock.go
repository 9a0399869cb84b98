// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/fairlead/fairlead/test/bench/report"
)

// What is measured over vsock. An emulated machine opens some tens of connections
// a second.
const (
	vsockRate = 20

	vsockToGuest   = "TCP to the guest over vsock, emulated, 1 flow"
	vsockToHost    = "TCP to the host over vsock, emulated, 1 flow"
	vsockManyFlows = "TCP to the guest over vsock, emulated, 64 flows"
	vsockRoundTrip = "TCP round trip of 64 bytes over vsock, emulated, 1 flow, median"
	vsockUDPEcho   = "UDP echo of 64 bytes over vsock, emulated, 16 clients, each one datagram under way"
)

var vsockShortConns = fmt.Sprintf("TCP connections of 64 bytes there and back over vsock, emulated, %d a second", vsockRate)

func vsockPart() Part {
	return Part{
		Section: report.Section{
			Name: "vsock", Title: "What the link costs a flow over vsock, in an emulated machine", Base: spliceWay,
			About: `The same as before, with vsock between host and guest: over its loopback on Linux ` + emulatedKernel + ` in a machine
that is emulated in software. That is some tens of times slower, so only its ratios mean something. The splice is
two relays that read and write, as splice(2) to vsock copies all the same; fairlead proves a token.`,
		},
		Run: func(ctx context.Context, e *Env) error { return e.inVM(ctx, "TestFlowsOverVsockInTheEmulatedMachine") },
	}
}

// flowsOverVsock measures flows where it is run.
func flowsOverVsock(ctx context.Context, e *Env) error {
	dir, err := e.Dir()
	if err != nil {
		return err
	}
	r, err := newFlowRig(ctx, e.Program, dir, true, (*flowRig).splice, (*flowRig).link)
	if err != nil {
		return err
	}
	defer r.close()
	d := e.For(3*time.Second, 3*time.Second, 500*time.Millisecond)
	measures := flowMeasures(vsockToGuest, vsockToHost, vsockManyFlows, vsockRoundTrip, vsockShortConns, vsockUDPEcho, vsockRate)
	return measureFlows(ctx, e, r, measures, e.Of(2, 1, 1), d)
}
