// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/host/hostpeer"
	"github.com/fairlead/fairlead/internal/setup/hostinstall"
	"github.com/fairlead/fairlead/internal/status"
)

func newHost() *cobra.Command {
	var file string
	var flags config.Host
	c := &cobra.Command{
		Use: "host", Short: "Run the host peer, which opens the ports of guests on this machine", Args: noArgs, GroupID: groupRun,
		Example: "  fairlead host --connect vsock://3:1023 --link-token FILE\n  fairlead host --config host.yaml",
		RunE: func(c *cobra.Command, _ []string) error {
			load := func() (config.Host, error) { return config.LoadHost(file, c.Flags(), os.LookupEnv) }
			cfg, err := load()
			if err != nil {
				return usageError{err}
			}
			out := c.ErrOrStderr()
			if cfg.LogFile != "" {
				f, err := openLog(cfg.LogFile)
				if err != nil {
					return fmt.Errorf("log file: %w", err)
				}
				defer func() { _ = f.Close() }()
				out = f
			}
			log, level := logger(out, cfg.Common)
			warnUnknown(log)
			d, err := hostpeer.New(cfg, log, level)
			if err != nil {
				if cfg.LogFile != "" { // else it is printed once, on standard error
					log.Error("cannot start", "err", err)
				}
				return err
			}
			d.Confine()
			hup, stop := hangups()
			defer stop()
			return d.Run(c.Context(), func(ctx context.Context, onChange func(config.Host, error)) {
				config.Watch(ctx, cfg, hup, load, onChange)
			})
		},
	}
	hostFlags(c.Flags(), &file, &flags)
	completeWords(c, flags.Words())
	c.AddCommand(newPair(), newInstall(), newUninstall(hostinstall.Machine{}))
	return c
}

func hostFlags(fs *pflag.FlagSet, file *string, flags *config.Host) {
	fs.StringVar(file, "config", "", "configuration file (default "+config.DefaultHostFile()+", which may be absent)")
	flags.Flags(fs)
}

// logMax is the size in bytes at which a log file is rotated at the next start.
const logMax = 8 << 20

func openLog(name string) (*os.File, error) {
	if fi, err := os.Stat(name); err == nil && fi.Size() > logMax {
		if err := os.Rename(name, name+".old"); err != nil {
			return nil, err
		}
	}
	return appendTo(name)
}

// appendTo opens a log file, and makes it and its directory.
func appendTo(name string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
}

func newInstall() *cobra.Command {
	return &cobra.Command{
		Use:   "install [-- HOST FLAGS]",
		Short: "Start the host peer now and at each logon",
		Long: "Start the host peer now and at each logon of this user: with a task of the Task Scheduler on Windows,\n" +
			"a launch agent on macOS, a systemd user unit on Linux. Flags after -- are passed to `fairlead host`.",
		Example: "  fairlead host install -- --connect vsock://3:1023",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			l, cfg, missing, err := logon(args)
			if err != nil {
				return err
			}
			if err := startable(c.Context(), cfg, hostinstall.Running(c.Context(), hostinstall.Machine{}, l)); err != nil {
				return fmt.Errorf("install: %w", err)
			}
			return report(c.OutOrStdout(), installed(l, cfg)+missing.note(), hostinstall.Install(c.Context(), hostinstall.Machine{}, l))
		},
	}
}

// startable returns why `fairlead host` would not start with a configuration. With replaces
// it is for the place of one that runs.
func startable(ctx context.Context, cfg config.Host, replaces bool) error {
	if err := hostpeer.Check(ctx, cfg, replaces); err != nil {
		return err
	}
	if cfg.LogFile == "" {
		return nil
	}
	f, err := appendTo(cfg.LogFile)
	if err != nil {
		return fmt.Errorf("log file: %w", err)
	}
	return f.Close()
}

func newUninstall(s hostinstall.System) *cobra.Command {
	return &cobra.Command{
		Use: "uninstall", Short: "Stop the host peer, and do not start it at logon any more", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			l, err := thisLogon() // whatever mistakes the configuration has
			if err != nil {
				return err
			}
			found, err := hostinstall.Uninstall(c.Context(), s, l)
			done := "Uninstalled. Configuration and token were kept."
			if !found {
				done = "Nothing to uninstall: `fairlead host install` installed nothing for this user."
				if _, err := s.ReadFile(hostinstall.PackagedUnit); err == nil {
					done += "\nThe unit of the package stays as it is: `systemctl --user disable --now fairlead-host` stops it."
				}
			}
			return report(c.OutOrStdout(), done, err)
		},
	}
}

// installed says what runs now, and how to see it.
func installed(l hostinstall.Logon, cfg config.Host) string {
	log := cmp.Or(cfg.LogFile, "journalctl --user -u fairlead-host")
	if i := slices.Index(l.Args, "--log-file"); i >= 0 && i+1 < len(l.Args) { // also logon's own
		log = l.Args[i+1]
	}
	return fmt.Sprintf("Installed: %s runs now and at each logon, so leave it where it is.\nLog: %s\nNext: fairlead doctor --host", l.Program, log)
}

func report(w io.Writer, done string, err error) error {
	if err == nil {
		_, err = fmt.Fprintln(w, done)
	}
	return err
}

// logon describes this program with flags for "host", which it validates, and returns the
// variables that it will not have.
func logon(args []string) (hostinstall.Logon, config.Host, unseen, error) {
	fs := pflag.NewFlagSet("host", pflag.ContinueOnError)
	var file string
	var flags config.Host
	hostFlags(fs, &file, &flags)
	err := fs.Parse(args)
	if err == nil && fs.NArg() > 0 {
		err = fmt.Errorf("%q: want flags only", fs.Arg(0))
	}
	if err == nil {
		err = absolute(fs)
	}
	var missing unseen
	var cfg config.Host
	if err == nil {
		cfg, err = config.LoadHost(file, fs, missing.lookup)
	}
	if err != nil {
		return hostinstall.Logon{}, config.Host{}, nil, usageError{fmt.Errorf("for `fairlead host`: %w", flagError(err))}
	}
	l, err := thisLogon()
	if err != nil {
		return hostinstall.Logon{}, config.Host{}, nil, err
	}
	l.Args, l.Env = append([]string{"host"}, args...), directories()
	if cfg.LogFile == "" && runtime.GOOS != "linux" { // on Linux the journal has it
		l.Args = append(l.Args, "--log-file", filepath.Join(filepath.Dir(config.DefaultHostFile()), "host.log"))
	}
	return l, cfg, missing, nil
}

// thisLogon describes this program and its user, without what it runs with.
func thisLogon() (hostinstall.Logon, error) {
	self, err := os.Executable()
	if err != nil {
		return hostinstall.Logon{}, err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return hostinstall.Logon{}, err
	}
	user, err := hostinstall.CurrentUser()
	if err != nil {
		return hostinstall.Logon{}, err
	}
	return hostinstall.Logon{OS: runtime.GOOS, Program: self, Home: home, User: user, Answers: hostAnswers}, nil
}

// hostAnswers returns whether a host peer answers at the usual control socket.
func hostAnswers(ctx context.Context) bool {
	_, err := status.NewClient(config.DefaultHost().Control).List(ctx)
	return !errors.Is(err, status.ErrNotRunning)
}

// absolute returns an error if a flag names a file by a relative path: what is installed
// starts in another directory.
func absolute(fs *pflag.FlagSet) (err error) {
	fs.Visit(func(f *pflag.Flag) {
		v := f.Value.String()
		if t := f.Value.Type(); v != "" && !filepath.IsAbs(v) && (f.Name == "config" || t == "file" || t == "path") {
			err = cmp.Or(err, fmt.Errorf("--%s %q: want an absolute path, as it will start in another directory", f.Name, v))
		}
	})
	return err
}

// directories are the variables of this shell by which the host's files are found. The
// user's service manager need not have them.
func directories() (env []string) {
	for _, name := range []string{"XDG_CONFIG_HOME", "XDG_STATE_HOME"} {
		if dir := os.Getenv(name); filepath.IsAbs(dir) {
			env = append(env, name+"="+dir)
		}
	}
	return env
}
