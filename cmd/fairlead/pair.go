// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/hvsock"
	"github.com/fairlead/fairlead/internal/pair"
)

// pairFlags are the flags of `fairlead host pair`.
type pairFlags struct {
	distribution, lima, podman, ssh, from string // where the token comes from
	libvirt                               pair.Libvirt
	guestFile, guest, file                string
}

func newPair() *cobra.Command {
	var f pairFlags
	c := &cobra.Command{
		Use: "pair", Args: noArgs,
		Short: "Fetch the link's token from a guest",
		Long: "Fetch the token with which agent and host authenticate, and store it for this user only.\n\n" +
			"The token is read by the guest's own administrator: by wsl.exe as root (the default on\n" +
			"Windows), limactl, podman, ssh, or virsh and the guest agent of QEMU. --libvirt also tells\n" +
			"the endpoint to connect to; with --ssh as well, the token is fetched by ssh.",
		Example: "  fairlead host pair --libvirt dev\n  fairlead host pair --ssh root@vm --guest dev\n" +
			"  fairlead host pair --lima dev\n  fairlead host pair --from token",
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c) },
	}
	fs := c.Flags()
	fs.StringVar(&f.distribution, "distribution", "", "WSL distribution of the agent (default: WSL's default)")
	fs.StringVar(&f.lima, "lima", "", "instance of Lima of the agent")
	fs.StringVar(&f.libvirt.Domain, "libvirt", "", "domain of libvirt of the agent")
	fs.StringVar(&f.libvirt.URI, "libvirt-uri", "", "connection of virsh, such as qemu:///system (default: virsh's own)")
	fs.StringVar(&f.podman, "podman", "", "Podman machine of the agent, such as podman-machine-default")
	fs.StringVar(&f.ssh, "ssh", "", "guest of the agent as ssh takes it, [USER@]HOST; USER is root, or needs sudo without a password")
	fs.StringVar(&f.guestFile, "guest-file", config.DefaultAgent().LinkToken, "path of the token in the guest")
	fs.StringVar(&f.from, "from", "", "file to read the token from; - for standard input")
	fs.StringVar(&f.guest, "guest", "", "name of the guest, as in --connect NAME=ENDPOINT; it has a token of its own")
	fs.StringVar(&f.file, "link-token", "", "file to store the token in (default "+config.DefaultHost().LinkToken+", or NAME.token beside it)")
	return c
}

func (f *pairFlags) run(c *cobra.Command) error {
	if f.guest != "" {
		if err := config.CheckGuestName(f.guest); err != nil {
			return usageError{fmt.Errorf("--guest %w", err)}
		}
	}
	channel, err := f.channel()
	if err != nil {
		return usageError{err}
	}
	host := config.DefaultHost()
	file := cmp.Or(f.file, host.TokenFileFor(f.guest))
	endpoint := "vsock://CID:1023" // where the channel does not tell
	if runtime.GOOS == "windows" {
		endpoint = "hvsock://ID:1023"
	}
	var note string
	switch {
	case f.libvirt.Domain != "":
		if endpoint, note, err = f.libvirtEndpoint(c.Context()); err != nil {
			return fmt.Errorf("pair: %w", err)
		}
	case f.wsl():
		endpoint = "hvsock://wsl:1023"
	}
	if channel == nil {
		err = f.take(c, file)
	} else {
		err = pair.Fetch(c.Context(), channel, f.guestFile, file)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.OutOrStdout(), "Token stored in %s.\n%sNext: %s\n", file, note, f.next(endpoint))
	return err
}

// channel returns what reads the token, nil for --from.
func (f *pairFlags) channel() (pair.Channel, error) {
	var list []string
	for _, one := range []struct{ flag, value string }{
		{"--distribution", f.distribution}, {"--lima", f.lima}, {"--podman", f.podman}, {"--ssh", f.ssh}, {"--from", f.from},
	} {
		if one.value != "" {
			list = append(list, one.flag)
		}
	}
	switch {
	case len(list) > 1:
		return nil, fmt.Errorf("%s: want one of these", strings.Join(list, " and "))
	case f.libvirt.Domain != "" && len(list) == 1 && f.ssh == "" && f.from == "":
		return nil, fmt.Errorf("--libvirt and %s: want one of these", list[0])
	case f.lima != "":
		return pair.Lima{Instance: f.lima}, nil
	case f.podman != "":
		return pair.Podman{Machine: f.podman}, nil
	case f.ssh != "":
		return pair.SSH{Destination: f.ssh}, nil
	case f.from != "":
		return nil, nil
	case f.libvirt.Domain != "":
		return f.libvirt, nil
	case !f.wsl():
		return nil, errors.New("no WSL here: say where the agent is: --libvirt, --lima, --podman, --ssh, or --from FILE (see `fairlead host pair --help`)")
	}
	return pair.WSL{Distribution: f.distribution, Run: hvsock.RunWSL}, nil
}

// wsl reports whether the guest is WSL.
func (f *pairFlags) wsl() bool {
	return runtime.GOOS == "windows" && f.lima == "" && f.podman == "" && f.ssh == "" && f.libvirt.Domain == ""
}

func (f *pairFlags) libvirtEndpoint(ctx context.Context) (endpoint, note string, err error) {
	cid, auto, err := f.libvirt.CID(ctx)
	if auto {
		note = "libvirt may choose another CID at the domain's next start: `virsh edit` fixes it with auto='no'.\n"
	}
	return fmt.Sprintf("vsock://%d:1023", cid), note, err
}

// take stores the token of --from.
func (f *pairFlags) take(c *cobra.Command, file string) error {
	r, err := pair.Open(f.from, c.InOrStdin())
	if err != nil {
		return fmt.Errorf("pair: %w", err)
	}
	defer func() { _ = r.Close() }()
	return pair.Take(r, file)
}

// next is the command that connects to the guest.
func (f *pairFlags) next(endpoint string) string {
	if f.guest != "" {
		endpoint = f.guest + "=" + endpoint
	}
	var args []string
	if endpoint != config.DefaultHost().Connect[0].String() {
		args = append(args, "--connect", endpoint)
	}
	if f.file != "" {
		args = append(args, "--link-token", f.file)
	}
	if len(args) == 0 {
		return "fairlead host install"
	}
	return "fairlead host install -- " + strings.Join(args, " ")
}
