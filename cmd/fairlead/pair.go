// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/link/hvsock"
	"github.com/fairlead/fairlead/internal/setup/pair"
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
			"the endpoint to connect to; with --ssh as well, the token is fetched by ssh. Where a token has\n" +
			"no use, as with Lima, only the next step is printed, unless --link-token or --guest-file is given.",
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
	if channel != nil {
		if err := channel.Check(); err != nil {
			return fmt.Errorf("pair: %w", err)
		}
	}
	host, err := f.host()
	if err != nil {
		return usageError{fmt.Errorf("for `fairlead host`: %w", err)}
	}
	file := host.TokenFileFor(f.guest)
	next := f.next(runtime.GOOS, host, file)
	if f.libvirt.Domain != "" {
		endpoint, note, err := f.libvirtEndpoint(c.Context())
		if err != nil {
			return fmt.Errorf("pair: %w", err)
		}
		next = note + f.amongOthers("Next: "+f.install(host, endpoint))
	}
	asked := host.TokenGiven || c.Flags().Changed("guest-file")
	switch {
	case f.needless(runtime.GOOS) && !asked:
		if f.podman == "" { // ssh makes no directory for its socket
			if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
				return fmt.Errorf("pair: %w", err)
			}
		}
		_, err = fmt.Fprintln(c.OutOrStdout(), next)
		return err
	case channel == nil:
		err = f.take(c, file)
	default:
		err = pair.Fetch(c.Context(), channel, f.guestFile, file)
		if err != nil && !asked && f.ssh != "" && f.libvirt.Domain == "" {
			err = fmt.Errorf("%w; where ssh forwards the agent's socket, no token is needed: %s", err, sshDocument)
		}
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.OutOrStdout(), "Token stored in %s.\n%s\n", file, next)
	return err
}

// sshDocument is how to connect to a guest by ssh alone.
const sshDocument = "https://github.com/fairlead/fairlead/blob/main/docs/linux-vm.md#ssh"

// host returns the configuration with which `fairlead host` starts on this machine, as far as
// it matters here: with --link-token no file is read.
func (f *pairFlags) host() (config.Host, error) {
	if f.file != "" {
		c := config.DefaultHost()
		c.LinkToken, c.TokenGiven = f.file, true
		return c, nil
	}
	fs := pflag.NewFlagSet("host", pflag.ContinueOnError)
	var file string
	var flags config.Host
	hostFlags(fs, &file, &flags)
	return config.LoadHost(file, fs, nil)
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

// needless reports whether no next step on an operating system has a use for the token: the
// socket that ssh forwards has none, and a Podman machine outside WSL needs no host peer.
func (f *pairFlags) needless(goos string) bool {
	if goos == "windows" || f.libvirt.Domain != "" {
		return false
	}
	return f.lima != "" || f.podman != "" || f.ssh != "" && f.guest == "" && goos == "darwin" // one with a name may dial out
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

// next returns how to connect to the guest from a host of an operating system, where libvirt
// does not tell. A socket that ssh forwards is beside the token's file.
func (f *pairFlags) next(goos string, host config.Host, file string) string {
	if slices.Contains(host.Serving.Guests, f.guest) {
		return f.guest + " dials this host, which reads the token when it dials again.\nNext: fairlead host install"
	}
	next := f.amongOthers(f.dial(goos, host, file))
	if f.guest != "" && (f.ssh != "" || f.from != "") {
		next += "\nA guest that dials out needs none of this: the host that listens for it reads the token when it dials again."
	}
	return next
}

// amongOthers adds to a next step what it means for other guests.
func (f *pairFlags) amongOthers(next string) string {
	if f.guest == "" || !strings.Contains(next, "host install -- --connect") {
		return next
	}
	return next + "\nThat takes the place of an earlier `fairlead host install`: name each other guest by its --connect as well."
}

// dial is next for a guest that this host dials.
func (f *pairFlags) dial(goos string, host config.Host, file string) string {
	windows := goos == "windows"
	name := cmp.Or(f.guest, f.lima, "vm")
	socket := filepath.Join(filepath.Dir(file), name+".sock")
	// By the connection that Lima's ssh shares (ControlPath), the forwarding would outlive this
	// command, and have that one's options.
	forward := fmt.Sprintf(`ssh -N -o ControlPath=none -o ExitOnForwardFailure=yes -o StreamLocalBindUnlink=yes -L "%s:%s" `, socket, config.DefaultAgent().Link[0].Path)
	allow := "A forwarded socket needs no token."
	if host.TokenGiven && f.file == "" { // with --link-token, install's command has none for a unix link
		allow = "host.yaml has a linkToken, which counts for a forwarded socket, too: start the agent with --link-token " + f.guestFile + "."
	}
	allow += " If ssh's user is not root, start the agent with --allow-uids and the id of that user."
	switch {
	case windows && (f.lima != "" || f.podman != ""):
		return "For a machine in WSL:\nNext: " + f.install(host, "hvsock://wsl:1023") + "\nFor one in Hyper-V: hvsock://ID:1023, with the ID that `(Get-VM NAME).Id` prints in PowerShell."
	case windows && f.ssh == "":
		return "Next: " + f.install(host, "hvsock://wsl:1023")
	case windows:
		return "Next: " + f.install(host, "hvsock://ID:1023") + "\nID is what `(Get-VM NAME).Id` prints in PowerShell."
	case f.podman != "":
		return "A Podman machine needs no host peer: its gvproxy opens the ports.\nNext: podman machine ssh --username root " + f.podman +
			" 'fairlead agent install -- --sink gvproxy'"
	case f.lima != "":
		return "Lima gives this machine no vsock to the guest: ssh forwards the agent's socket.\n" + allow +
			"\nNext: " + forward + "-F " + shellWord(limaConfig(f.lima)) + " lima-" + f.lima + "\nThen: " + f.install(host, "unix://"+socket)
	case f.ssh != "" && goos == "darwin":
		return allow + "\nNext: " + forward + f.ssh + "\nThen: " + f.install(host, "unix://"+socket)
	case f.ssh != "":
		return "Next, for a VM of this machine that has vsock (QEMU: guest-cid=CID): " + f.install(host, "vsock://CID:1023") +
			"\nElse ssh forwards the agent's socket. " + allow + "\nNext: " + forward + f.ssh + "\nThen: " + f.install(host, "unix://"+socket)
	}
	return "Next: " + f.install(host, "vsock://CID:1023") + "\nCID is that of the VM's definition (QEMU: guest-cid=CID)."
}

// limaConfig returns the file with ssh's configuration of an instance: that of Lima, or of
// Colima, which has a directory of instances of its own. Where neither has it, it will be
// Lima's.
func limaConfig(instance string) string {
	home, err := os.UserHomeDir()
	if err != nil {
		home = "~"
	}
	dirs := []string{os.Getenv("LIMA_HOME")}
	if dirs[0] == "" {
		dirs[0] = filepath.Join(home, ".lima")
		for _, colima := range []string{
			os.Getenv("COLIMA_HOME"), filepath.Join(home, ".colima"),
			filepath.Join(cmp.Or(os.Getenv("XDG_CONFIG_HOME"), filepath.Join(home, ".config")), "colima"),
		} {
			if colima != "" {
				dirs = append(dirs, filepath.Join(colima, "_lima"))
			}
		}
	}
	for _, dir := range dirs {
		file := filepath.Join(dir, instance, "ssh.config")
		if _, err := os.Stat(file); err == nil {
			return file
		}
	}
	return filepath.Join(dirs[0], instance, "ssh.config")
}

// install is the command that connects to the guest, now and at each logon. Where host.yaml
// lists guests, --connect would take the place of that list.
func (f *pairFlags) install(host config.Host, endpoint string) string {
	const command = "fairlead host install"
	if f.guest != "" {
		endpoint = f.guest + "=" + endpoint
	}
	// A host that listens connects to none unless it is told to.
	if len(host.Connect) > 0 && !slices.Equal(host.Connect, config.DefaultHost().Connect) {
		if slices.ContainsFunc(host.Connect, func(g config.Guest) bool { return g.String() == endpoint }) {
			return command
		}
		return fmt.Sprintf("have %q under connect in %s, then run: %s", endpoint, host.File(), command)
	}
	unix := strings.Contains(endpoint, "unix://")
	var args []string
	if endpoint != config.DefaultHost().Connect[0].String() {
		args = append(args, "--connect", shellWord(endpoint))
	}
	if f.file != "" && !unix { // a unix link has a token only if it is asked for
		file := f.file
		if abs, err := filepath.Abs(file); err == nil {
			file = abs // it will start in another directory
		}
		args = append(args, "--link-token", shellWord(file))
	}
	if len(args) == 0 {
		return command
	}
	return command + " -- " + strings.Join(args, " ")
}

// shellWord quotes what has a space, as a directory of macOS.
func shellWord(s string) string {
	if strings.Contains(s, " ") {
		return `"` + s + `"`
	}
	return s
}
