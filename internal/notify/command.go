// SPDX-License-Identifier: Apache-2.0

package notify

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"time"

	"github.com/fairlead/fairlead/internal/trust"
)

// command shows a notification. No shell reads it, and title and text are never a part of a
// script: they are arguments or variables.
type command struct {
	program string
	args    []string
	env     []string // beside this process's
}

// The variables in which the script of Windows finds the title and the text.
const (
	titleVariable = "FAIRLEAD_NOTIFICATION_TITLE"
	textVariable  = "FAIRLEAD_NOTIFICATION_TEXT"
)

// osascript shows its two arguments.
var osascript = []string{"-e", "on run argv", "-e", "display notification (item 2 of argv) with title (item 1 of argv)", "-e", "end run"}

// toast shows the two variables. The application is PowerShell, as Windows shows nothing of
// one that is not installed.
const toast = `$ErrorActionPreference = 'Stop'
$null = [Windows.UI.Notifications.ToastNotificationManager, Windows.UI.Notifications, ContentType = WindowsRuntime]
$xml = [Windows.UI.Notifications.ToastNotificationManager]::GetTemplateContent([Windows.UI.Notifications.ToastTemplateType]::ToastText02)
$texts = $xml.GetElementsByTagName('text')
$null = $texts.Item(0).AppendChild($xml.CreateTextNode($env:` + titleVariable + `))
$null = $texts.Item(1).AppendChild($xml.CreateTextNode($env:` + textVariable + `))
$application = '{1AC14E77-02E7-4E5D-B744-2EB1AE5198B7}\WindowsPowerShell\v1.0\powershell.exe'
[Windows.UI.Notifications.ToastNotificationManager]::CreateToastNotifier($application).Show([Windows.UI.Notifications.ToastNotification]::new($xml))`

// commandFor returns the command of a system (runtime.GOOS).
func commandFor(system, title, text string) command {
	switch system {
	case "windows":
		return command{
			`WindowsPowerShell\v1.0\powershell.exe`, []string{"-NoLogo", "-NoProfile", "-NonInteractive", "-WindowStyle", "Hidden", "-Command", toast},
			[]string{titleVariable + "=" + title, textVariable + "=" + text},
		}
	case "darwin":
		// The title does not begin with a hyphen, and what follows it is no option any more.
		return command{"/usr/bin/osascript", append(append([]string{}, osascript...), title, text), nil}
	}
	return command{"notify-send", []string{"--app-name=fairlead", "--", title, text}, nil}
}

// find returns the path of its program.
func (c command) find() (string, error) {
	switch runtime.GOOS {
	case "windows":
		return trust.Find(c.program)
	case "darwin":
		return c.program, nil
	}
	path, err := trust.InPath(c.program)
	if err != nil {
		err = fmt.Errorf("%w: install it, with many distributions in the package libnotify-bin or libnotify", err)
	}
	return path, err
}

// Available returns why this system has no program that shows notifications.
func Available() error {
	_, err := commandFor(runtime.GOOS, "", "").find()
	return err
}

const (
	end       = time.Second // for a program to end after it was killed
	maxOutput = 512         // bytes of its output in an error
)

// Show shows a notification on the desktop of this process's user, and waits for the program
// that does.
func Show(ctx context.Context, title, text string) error {
	c := commandFor(runtime.GOOS, title, text)
	path, err := c.find()
	if err != nil {
		return err
	}
	var out head
	cmd := exec.CommandContext(ctx, path, c.args...)
	cmd.Env = append(os.Environ(), c.env...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, end
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("%s: %w: %s", path, err, bytes.TrimSpace(out.kept))
	}
	return nil
}

// head keeps the beginning of what is written.
type head struct{ kept []byte }

func (h *head) Write(b []byte) (int, error) {
	h.kept = append(h.kept, b[:min(len(b), maxOutput-len(h.kept))]...)
	return len(b), nil
}
