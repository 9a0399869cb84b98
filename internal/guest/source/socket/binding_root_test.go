// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package socket

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// TestAddressesOfAnInterface asks the kernel about the addresses of a new interface.
func TestAddressesOfAnInterface(t *testing.T) {
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = space.Close() }()
	for _, args := range []string{
		"link add own0 type veth peer name other0", "addr add 10.9.9.1/24 broadcast + dev own0",
		"addr add fd09::1/64 nodad dev own0", "link set other0 up", "link set own0 up",
	} {
		cmd := exec.Command("ip", strings.Fields(args)...)
		if err := space.Start(cmd); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatalf("ip %s: %v", args, err)
		}
	}
	err = space.Do(func() error {
		own, err := net.InterfaceByName("own0")
		if err != nil {
			return err
		}
		got := ownDevice(uint32(own.Index))
		if got.down || !slices.Contains(got.addresses, netip.MustParseAddr("10.9.9.1")) || !slices.Contains(got.addresses, netip.MustParseAddr("fd09::1")) {
			t.Errorf("%+v", got)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	for text, want := range map[string]netwatch.Kind{
		"10.9.9.1": netwatch.Own, "fd09::1": netwatch.Own, "10.9.9.2": netwatch.Elsewhere, "fd09::2": netwatch.Elsewhere,
		"10.9.9.255": netwatch.Broadcast, "10.8.8.8": netwatch.Elsewhere, "fd08::8": netwatch.Elsewhere,
		"127.255.255.255": netwatch.Broadcast, "255.255.255.255": netwatch.Broadcast,
	} {
		wait.Until(t, "the kind of "+text, func() error { // routes of IPv6 come with a delay
			return space.Do(func() error {
				if got := addressKind(netip.MustParseAddr(text)); got != want {
					return fmt.Errorf("it is %d, want %d", got, want)
				}
				return nil
			})
		})
	}
}
